"""Replicas as separate jobs: named pieces of data over HTTPS or through a folder, and rounds that both or neither
count.

The files from the bottom up; each imports only those of its own line and above:

| files | what they are about |
|---|---|
| `compatibility`, `keys`, `statuses` | which jobs fit together; certificates; members, and what each publishes |
| `mesh` | the interface: members, statuses, pieces |
| `https_server`, `https_transfers` | connections over HTTPS, and the pieces that pass on them |
| `https_links`, `https_client`, `https_answers`, `https_carrier` | who is there; requests; the carrier |
| `visit` | a program that is no member asks a member |
| `store`, `folder_members`, `folder_carrier` | the carrier through a folder or a bucket |
| `members` | this replica among the others; lines on who comes and goes |
| `network` | from the settings to the members: addresses, ports |
| `pairing`, `partners` | the partner of a round, and how long it is waited for |
| `movement`, `gather`, `codes` | vectors bucket by bucket: inside a replica, of a pair |
| `rounds` | a round that counts for both partners or for neither |
| `states`, `recovery`, `catch_up` | a state of a peer; which step comes |
| `end_of_run`, `final_mean` | who is waited for at the end; the mean of those that have come |
| `membership` | how a job enters a federation |
| `federation_peers` | the other jobs, as a training loop meets them |

A replica has a *slot*, and each later process of it a larger *incarnation*. Rank 0 of a replica is its *leader*,
which alone is a member; the other ranks are *followers*. A round, a state, the final mean are blocking code above
`offer`, `fetch`, `members` and `publish`, read from top to bottom.

The life of a newcomer:

| step | function |
|---|---|
| a machine with the key writes a file: certificate, addresses, config | `preflight.inviting.invite` |
| the newcomer writes its folder from it, by `join` | `preflight.newcomer.write_job` |
| the job reads its member file | `membership.network_of`, `Keys.identity` |
| it asks an address, and learns all statuses; opens a link to each member | `Seeds._meet`, `HttpsCarrier._dial` |
| in a folder it reads the signs of life of all | `FolderMembers.tend` |
| it has its slot; an earlier process of the slot ends | `Network.open`, `Members.check` |
| it waits for others that start with it | `Membership.wait_for_start` |
| it takes the state of the member that is furthest | `FederationPeers.begin`, `States.recover` |
| it says which rounds it has begun, and has the first with a partner | `CatchUp.start`, `PairExchange.begin` |

| thread | of | does | reads and writes |
|---|---|---|---|
| the main thread | each rank | trains, begins and ends rounds, copies and takes states | **weights**: it alone |
| "noloco-round" | leader, one for each open round | exchanges with the partner | a copy of the weights; the mean |
| "noloco-state" | each rank | gives a state to others | a copy of the state |
| "noloco-gather", two | followers, in a transfer | moves parts to the leader and from it | copies and results |
| "noloco-members" | leader | writes lines on who comes and goes | no vector |
| "federation" | leader | event loop of HTTPS | pieces |
| "folder", nine | leader, with a folder | reads and writes files | pieces |
"""
