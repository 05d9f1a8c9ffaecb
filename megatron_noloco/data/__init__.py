"""Data: text to tokens to microbatches, each addressed by (step, replica, dp, microbatch).

| object | what it does |
|---|---|
| `Kind` (`kinds`) | writes a dataset of Megatron in the `cache`, says which part is for training |
| `auto_tokenizer`, `fast_tokenizer` | what AutoTokenizer reads, kept once per host |
| `inputs`, `formats`, `encode`, `records` | files in pieces, which become tokens; records and chats with a mask |
| `preprocess` | the same, under a name |
| `Dataset` (`indexed`) | a dataset or a part of one, mapped: tokens, where sequences begin, the mask |
| `Blend` (`blend`) | the samples of datasets (`samples`), or of records that share samples (`record_samples`) |
| `Order` (`plans.sample_order`) | which sample is at which place, from the seed and the place alone |
| `Loader` (`microbatches`) | reads the microbatches of a step ahead |
"""
