#!/bin/sh
# A script of Hugging Face's examples
MODEL=example/small-model
accelerate launch --num_processes 4 --mixed_precision=bf16 run_clm.py \
    --model_name_or_path $MODEL \
    --train_file corpus.txt --validation_split_percentage 5 --block_size 128 \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 \
    --learning_rate 5e-4 --lr_scheduler_type linear --warmup_ratio 0.1 --max_steps 20 \
    --bf16 --do_train --do_eval False --save_strategy no \
    --output_dir runs/clm --overwrite_output_dir --report_to none
