#!/bin/bash
# What torchrun starts for every process: a run that begins, or resumes at its last whole epoch, on the machines that are
# left. With a fixed number of replicas it ends in the same weights, to the bit. `runs` is on a disk that all machines see;
# --rdzv-endpoint names the one that must survive. On every machine, with is_host=true on that one and false on the others
# (without the variable, the restarted processes may read the addresses of those that were lost):
#
#   TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
#   torchrun --nnodes=1:2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
#     --rdzv-conf=is_host=true --no-python bash scripts/elastic.sh runs/job \
#     --trainer.strategy=manual_allreduce --trainer.strategy.replicas=4
run=$1
shift
if [ -f "$run/config.yaml" ]; then
  set -- --resume="$run" "$@"
else
  set -- --run_dir="$run" "$@"
fi
# the machines of this start: torchrun tells how many processes there are
exec python -m lightning_mgpu fit "$@" \
  --trainer.devices="$LOCAL_WORLD_SIZE" --trainer.num_nodes=$((WORLD_SIZE / LOCAL_WORLD_SIZE))
