"""Replicas as separate jobs: named pieces of data over HTTPS or through a folder, and rounds that both or neither
count.

The files from the bottom up; each imports only those of its own line and above:

| files | what they are about |
|---|---|
| `compatibility`, `keys`, `statuses` | which jobs fit together; certificates; members, and what each publishes |
| `mesh` | the interface: members, statuses, pieces |
| `https_server`, `https_links`, `https_client`, `https_answers`, `https_carrier` | the carrier over HTTPS |
| `visit` | a program that is no member asks a member |
| `store`, `folder_members`, `folder_carrier` | the carrier through a folder or a bucket |
| `members` | this replica among the others; lines on who comes and goes |
| `network` | from the settings to the members: addresses, ports |
| `pairing`, `partners` | the partner of a round, and how long it is waited for |
| `movement`, `gather`, `codes` | vectors bucket by bucket: inside a replica, of a pair |
| `rounds` | a round that counts for both partners or for neither |
| `states`, `recovery`, `catch_up`, `final_mean` | a state of a peer; which step comes; the mean at the end |
| `membership` | how a job enters a federation |
| `federation_peers` | the other jobs, as a training loop meets them |

A replica has a *slot*, and each later process of it a larger *incarnation*. Rank 0 of a replica is its *leader*,
which alone is a member; the other ranks are *followers*. A round, a state, the final mean are blocking code above
`offer`, `fetch`, `members` and `publish`, read from top to bottom.

A leader has these threads: the training loop; "noloco-round", one for each round under way, which reads the
weights' copy and writes the mean, never the weights; "noloco-state", on all ranks, which gives a copy of the state
to others; "noloco-members", which writes lines on who comes and goes; "federation", the event loop of HTTPS; and
those of the folder. A follower has two more during a transfer, "noloco-gather".
"""
