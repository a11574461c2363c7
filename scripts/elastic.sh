#!/bin/bash
# What torchrun starts once per machine: a run that begins, or resumes at its last whole epoch, on the machines that are
# left. Lightning's launcher then starts this machine's share of the replicas, so their number never changes, and the run ends
# in bitwise identical weights. `runs` is on a disk that all machines see; --rdzv-endpoint names the machine that must
# survive. On every machine, with is_host=true on that one and false on the others:
#
#   TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=1 \
#   torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
#     --rdzv-conf=is_host=true --no-python bash scripts/elastic.sh runs/job \
#     --trainer.strategy=manual_allreduce --trainer.strategy.replicas=4
set -eu
run=$1
shift
if [ "${TORCHELASTIC_USE_AGENT_STORE:-}" = True ]; then
  echo "error: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: restarted processes may read addresses of lost ones" >&2
  exit 2
fi
# the machines of this start: torchrun starts one process on each
export NODE_RANK=$GROUP_RANK
set -- "$@" --trainer.num_nodes="$WORLD_SIZE"
for name in $(compgen -e); do
  case $name in RANK | WORLD_SIZE | LOCAL_* | GROUP_* | ROLE_* | TORCHELASTIC_*) unset "$name" ;; esac
done
if [ -f "$run/config.yaml" ]; then
  set -- --resume="$run" "$@"
else
  set -- --run_dir="$run" "$@"
fi
exec python -m lightning_mgpu fit --trainer.devices=1 "$@"
