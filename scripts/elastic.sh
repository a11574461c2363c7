#!/bin/bash
# What torchrun starts on every machine: a run of four replicas that begins, or resumes at its last whole epoch, on the
# machines that are left. It ends in the same weights, to the bit. `runs` is on a disk that all machines see;
# --rdzv-endpoint names the one that must survive. On every machine, with is_host=true on that one and false on the others:
#
#   torchrun --nnodes=1:2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
#     --rdzv-conf=is_host=true --no-python bash scripts/elastic.sh runs/job --model=ResNet18
run=$1
shift
if [ -f "$run/config.yaml" ]; then
  set -- --resume="$run" "$@"
else
  set -- --run_dir="$run" "$@"
fi
exec python -m lightning_mgpu fit "$@" --trainer.strategy=manual_allreduce --trainer.strategy.replicas=4 \
  --trainer.devices="$LOCAL_WORLD_SIZE" --trainer.num_nodes=$((WORLD_SIZE / LOCAL_WORLD_SIZE))
