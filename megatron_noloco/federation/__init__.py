"""Replicas as separate jobs: who is there, messages between them, rounds that both or neither count.

The files from the bottom up; each imports only those of its own line and above:

| files | what they are about |
|---|---|
| `wires`, `keys` | connections, which one thread moves; the key that encrypts them |
| `store` | a shared folder, or a bucket |
| `control`, `session` | small messages and the meaning of each; bulk data between two replicas |
| `likeness`, `rendezvous` | which jobs fit together; where they are |
| `streams`, `tcp` | a conversation of two jobs as one stream of bytes; nothing uses it yet |
| `sealing`, `folder_stream`, `folder` | the same through a shared folder or a bucket, by files |
| `exchanges`, `peers`, `service` | the other replicas: which messages are void; connections; the thread for both |
| `pairing`, `partners` | the partner of a round, and how long it is waited for |
| `network` | all of this for other threads: a transport, and what is known of each other replica |
| `movement`, `passes`, `speakers` | vectors between the ranks of a replica and its speaker, and between speakers |
| `gather`, `swap` | the same on streams: slabs inside a replica, and of a pair; nothing uses it yet |
| `moved_exchange`, `commit` | a round that counts for both partners or for neither |
| `asks`, `handover` | a state that another job takes over |
| `keeping_up`, `tree_mean` | the local step at which a replica goes on; the mean at its end |
| `membership` | a job of a federation, as a training loop has it |
| `ticket`, `invitation`, `joining` | a machine without the key joins: the line, the job's side, its own side |
| `inquiry` | which jobs are there, for a program that is none |

A replica has a *slot*, and each later process of it a larger *epoch*. Rank 0 of a replica is its *speaker*, which
alone is connected to others. An exchange has a number, the same for both partners; when it is over on one side,
its messages are void on both.

A speaker has these threads: the training loop; "federation" (`service`), which moves all bytes; "rendezvous"
(`network`), which looks for addresses; "noloco-moving" (`moved_exchange`), for a round; "handover", for a state.
"""
