"""Data: text to tokens to microbatches, each addressed by (step, replica, dp, microbatch).

| object | what it does |
|---|---|
| `Corpus` (`corpus`) | a text or records: makes a dataset of Megatron, in the `cache` or under a name |
| `Opened` (`opening`, `data_in_words`) | the datasets of a run, which it divides for training and validation |
| `Tokenizer` (`tokenizer`, `auto_tokenizer`) | bytes; or what AutoTokenizer reads, kept once per host |
| `inputs`, `formats`, `encode`, `records` | files in pieces, which become tokens; records and chats with a mask |
| `Dataset` (`indexed`) | a dataset or a part of one, mapped: tokens, where sequences begin, the mask |
| `Blend` (`blend`) | the samples of datasets (`samples`), or of records that share samples (`record_samples`) |
| `Order` (`plans.sample_order`) | which sample is at which place, from the seed and the place alone |
| `Loader` (`microbatches`) | reads the microbatches of a step ahead |
"""
