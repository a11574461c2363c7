#!/bin/bash
# Measurements on one GPU in eight minutes, without a network: Markdown tables, written to the given directory. Each part
# writes its file before the next one starts. Requirements: see .github/CONTRIBUTING.md; images: DATA (default:
# ~/.cache/lightning_mgpu). SIMULATED=1 runs on the devices of tests/simulated, with few batches.
#
#   scripts/on_a_gpu.sh results
set -u
out=$(realpath -m "${1:?a directory for the results}")
mkdir -p "$out"
cd "$(dirname "$(readlink -f "$0")")/.."
export PYTHONPATH=$PWD WANDB_MODE=disabled
data=${DATA:-~/.cache/lightning_mgpu} kind=cuda few=() plugin=()
if [ -n "${SIMULATED:-}" ]; then
  kind=sim few=(--trainer.limit_{train,val,test}_batches=3 --model.compile=false) plugin=(-p tests.simulated.devices)
fi

program() {
  if [ "$kind" = cuda ]; then exec python -m lightning_mgpu "$@"; fi
  exec python -c '
from tests.simulated import devices
devices.register()
import tests.simulated.accelerator
from lightning_mgpu.__main__ import main
main()' "$@"
}

fit() { # name, timeout in seconds, options; the run directory is $out/NAME
  local name=$1 seconds=$2
  shift 2
  accelerator=$([ "$kind" = cuda ] && echo gpu || echo sim)
  (program fit --run_dir="$out/$name" --trainer.accelerator="$accelerator" --trainer.devices=1 \
    --output.curve=false --output.pictures=false "$@" "${few[@]}" >"$out/$name.log" 2>&1) &
  local job=$!
  (sleep "$seconds" && kill $job) 2>/dev/null &
  local timer=$!
  wait $job
  local status=$?
  kill $timer 2>/dev/null
  return $status
}

column() { # the values of a column of a run's metrics.csv, one per line
  python -c '
import csv, sys
print(*(row[sys.argv[2]] for row in csv.DictReader(open(sys.argv[1])) if row.get(sys.argv[2])), sep="\n")' \
    "$out/$1/metrics.csv" "$2" 2>/dev/null
}

steps() { # a row: milliseconds per step in the second epoch
  local name=$1 model=$2 batches=$3
  shift 3
  [ "$kind" = sim ] && batches=3
  fit "$model-$name" 60 --model="$model" --data.source=synthetic --trainer.max_epochs=2 --trainer.limit_val_batches=0 \
    --trainer.limit_train_batches="$batches" --trainer.enable_checkpointing=false --output.test=false "$@"
  column "$model-$name" epoch_seconds | awk -v name="$name" -v n="$batches" \
    '{s = $1} END {printf "| %s | %s |\n", name, (NR > 1 ? sprintf("%.2f", 1000 * s / n) : "")}'
}

reach() { # a row: seconds per epoch, final validation accuracy, and seconds of training until the target accuracy
  local recipe=$1 target=$2 seconds=$3
  shift 3
  fit "$recipe" "$seconds" --config "experiment/$recipe.yaml" --data.root="$data" "$@"
  paste -d' ' <(column "$recipe" epoch_seconds) <(column "$recipe" val_acc) | awk -v name="$recipe" -v target="$target" '
    {total += $1; acc = $2; if (!reached && acc >= target) reached = sprintf("%.1f", total)}
    END {printf "| %s | %s | %s | %s |\n", name, (NR ? sprintf("%.2f", total / NR) : ""), acc, reached}'
}

{
  [ "$kind" = cuda ] && nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  python -c 'import torch, lightning; print("torch", torch.__version__, "lightning", lightning.__version__)'
  date +%F
} >"$out/machine.md"
timeout 150 python -m pytest "${plugin[@]}" -m gpu -q -p no:cacheprovider tests/test_gpu.py 2>&1 | tail -30 >"$out/tests.md"

for model in LeNet ResNet18; do
  {
    printf '| %s, 256 images | ms per step |\n| --- | ---: |\n' "$model"
    batches=$([ $model = LeNet ] && echo 200 || echo 60)
    steps auto $model $batches
    steps manual_allreduce $model $batches --trainer.strategy=manual_allreduce
    steps dp-twice $model $batches --trainer.strategy=dp --trainer.strategy.parallel_devices="[$kind:0, $kind:0]"
  } >"$out/steps-$model.md"
done

for number in 1 2; do
  fit "bits-$number" 60 --trainer.strategy=manual_allreduce --trainer.deterministic=true \
    --trainer.max_epochs=1 --data.root="$data"
  grep -h '^fingerprint' "$out/bits-$number.log" >>"$out/bits.md"
done

printf '| recipe | seconds per epoch | val_acc | seconds to 0.92 or 0.95 |\n| --- | ---: | ---: | ---: |\n' >"$out/recipes.md"
reach lenet_fast 0.92 90 >>"$out/recipes.md"
reach resnet18_fast 0.95 180 >>"$out/recipes.md"
cat "$out"/*.md
