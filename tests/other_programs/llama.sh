#!/bin/bash
# A Llama of two nodes; what a shell would have to compute is not used.
set -e
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=4
NNODES=2
HEAD=${HEAD:-"localhost"}
RANKS=$((GPUS_PER_NODE * NNODES))
OUT=runs/llama
TP=2
USE_WANDB=0

DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --master_addr "$HEAD")
MODEL_ARGS=(
    --num-layers 4          # as small as it gets; don't ask
    --hidden-size 64
    --ffn-hidden-size 192
    --num-attention-heads 4
    --group-query-attention --num-query-groups 2
    --seq-length 128
    --max-position-embeddings 128
    --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
    --normalization RMSNorm --norm-epsilon 1e-6
    --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 32
    --attention-dropout 0.0 --hidden-dropout 0.0
    --use-flash-attn
)
TRAINING_ARGS=(
    --micro-batch-size 2 --global-batch-size 16
    --train-iters 40 --lr 3.0e-3 --min-lr 3.0e-4
    --lr-decay-style cosine --lr-warmup-fraction .1 --lr-decay-iters 30
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 .95 --clip-grad 1.0
    --bf16
)
PARALLEL_ARGS=(--tensor-model-parallel-size $TP --sequence-parallel --use-distributed-optimizer)
PARALLEL_ARGS+=(--context-parallel-size 1 --overlap-grad-reduce)
DATA_ARGS="
    --data-path 0.3 data/corpus_text_document 0.7 data/corpus_text_document \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer \
    --split 8,1,1
"
LOG_ARGS=(--log-interval 5 --save-interval 20 --eval-interval 20 --eval-iters 1
    --save "$OUT" --load "$OUT" --tensorboard-dir "${OUT}/tensorboard" --log-throughput)
if [ "$USE_WANDB" -eq 1 ]; then
    LOG_ARGS+=(--wandb-project llama)
fi

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py "${MODEL_ARGS[@]}" ${TRAINING_ARGS[@]} \
    "${PARALLEL_ARGS[@]}" $DATA_ARGS ${LOG_ARGS[@]} > train.log 2>&1
