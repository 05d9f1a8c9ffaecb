"""Replicas as separate jobs: who is there, conversations between them, rounds that both or neither count.

The files from the bottom up; each imports only those of its own line and above:

| files | what they are about |
|---|---|
| `streams` | a conversation of two jobs as one stream of bytes, both ways |
| `keys` | the key of a federation: what encrypts connections, and files |
| `store`, `folder_stream`, `folder` | streams as files of a shared folder or a bucket |
| `messages`, `compatibility` | small messages; which jobs fit together |
| `directory`, `tcp`, `rendezvous` | addresses; streams as connections; where the first addresses are found |
| `ledger`, `links` | which rounds count; another replica, as this one sees it |
| `dialling`, `node` | who dials whom; this replica among the others |
| `node_thread`, `network` | the thread of all of this, and lines on who comes and leaves; how a job starts it |
| `pairing`, `partners` | the partner of a round, and how long it is waited for |
| `movement`, `gather`, `swap`, `delivery` | vectors bucket by bucket: inside a replica, of a pair, one way |
| `rounds` | a round that counts for both partners or for neither |
| `states`, `takeover`, `catch_up`, `final_mean` | a state taken over; which step comes; the mean at the end |
| `membership` | how a job enters a federation |
| `federation_peers` | the other jobs, as a training loop meets them |
| `invitation`, `joining` | a machine without the key joins: the job's side; its own side, and the line |

A replica has a *slot*, and each later process of it a larger *incarnation*. Rank 0 of a replica is its *leader*,
which alone is connected to others; the other ranks are *followers*. Two leaders keep a link for small messages. A
round, a state, a final mean, the questions of a newcomer are one stream each. An `async def` on each side reads it
from top to bottom. Its end ends the conversation on both sides, and nothing outlives it.

A leader has these threads: the training loop; "federation" (`node_thread`), the event loop of all streams;
"noloco-arithmetic", for what takes long there. Each rank of a replica of several has two more during a transfer,
"noloco-gather". File systems and name servers, which may block, are asked in threads of the event loop.
"""
