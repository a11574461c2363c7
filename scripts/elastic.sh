#!/bin/bash
# Elastic training: torchrun starts this script once per machine. It starts a run, or resumes it from its last complete
# epoch on the remaining machines. Lightning's launcher starts this machine's share of the replicas, so their total number
# is constant, and the final weights are bitwise identical. `runs` must be on a shared disk; the machine of
# --rdzv-endpoint must not fail. Run on every machine, with is_host=true on that machine, and false on the others:
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
# one process per machine of this start
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
