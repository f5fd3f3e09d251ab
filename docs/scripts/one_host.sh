#!/usr/bin/env bash
# One host: profile a model, plan for the GPUs of this host, train, and write the
# weights.
#
#   GPUS=4 ./one_host.sh model.py
#
# Without GPUs it uses the CPU, with GPUS as the number of workers.
set -euo pipefail

model=${1:?"usage: one_host.sh model.py"}
gpus=${GPUS:-2}
batch_size=${BATCH_SIZE:-16}

# Workers that share a CPU slow each other down, so the profile is measured beside
# others; GPUs are not shared.
beside=()
python -c 'import sys, torch; sys.exit(torch.cuda.is_available())' && beside=(--processes "$gpus")

plan profile "$model" --batch-size "$batch_size" "${beside[@]}"
torchrun --nproc-per-node "$gpus" -m planner profile --links # writes cluster.json
plan solve --cluster cluster.json
plan train "$model" --epochs "${EPOCHS:-3}" --checkpoint-every "${CHECKPOINT_EVERY:-500}" --resume \
    --save-weights model.safetensors
