"""The fixed texts of docs/measurements.md, which stand between what files give."""

NOT_MEASURED = "Not measured."

EMPTY = """
No results yet: there is no file in `benchmarks/results/`. To make one, on a quiet machine:

    mpirun -np 4 blinkmpi bench all_reduce -b 64K -e 256M -f 4 --compare mpi -J benchmarks/results/all_reduce-np4.json
    make docs
"""

LEGEND = """
Times are in microseconds. Ratio is MPI's time divided by ours, so more than 1 means that blinkmpi is faster. The
executor is what executed our call: `c`, `numpy`, or `mpi` where the selection table hands a call of that size to MPI's
own collective (the time then includes our check at entry). `mean from 1 MiB` is the geometric mean of the ratios of
all rows of at least 1 MiB, whoever ran them. Two files compare only if their hardware agrees.
"""

GPU_LEGEND = """
## GPUs

Buffers in GPU memory, calls on one stream between two events, or in a CUDA graph (`-G`). Times are in microseconds per
call, of the slowest rank. Ratio is the other library's time divided by ours, so more than 1 means that blinkmpi is
faster; `N/A` where a library cannot run the call. Protocol is how our call travels, CTAs how many groups of threads it
takes. Means are geometric, below 1 MiB and from 1 MiB on.
"""

EMULATED_LEGEND = """
## Emulated machines

Allreduce (float32, sum) on GPUs that are joined by NVSwitch and play parts of another machine; nothing here was
measured on that machine. Rates are bytes of the vector per second, in GB/s. Plan is the planner's rate, share is ours
as a part of it, ratio is ours by NCCL's: more than 1 means that blinkmpi is faster.

**The two are not limited alike.** Ours is paced in the kernel, link by link. NCCL only chooses its rings and trees by a
topology file that says that the GPUs are wired so; their bytes then go as fast as the real machine lets them, which is
how a rate of NCCL's can be above the bound (marked >). So the first ratio says what NCCL's choice costs on hardware
that is no slower than the emulated one. *Its rings, paced* and *its trees, paced* are the same rings and trees, as
algorithms of ours on the same paced links as our trees; the second ratio is to the faster of the two. "-" was not
measured.
"""

CALL_FORMS_LEGEND = """
## Calls as programs write them

Other forms of buffers, lengths that differ from call to call, requests and communicators, on CPU ranks of one host.
Each row is a loop of one call, ours and plain mpi4py's in turn on the same buffers of one job. A cell is mpi4py's time
of a call divided by ours, the median over rounds, and in brackets our time in microseconds; what is below the goal is
bold:

- *A communicator* is made by MPI, once all ranks have met under the deadline. Ours adds the Python of an object, and
  its first call an exchange by which the ranks agree on what the last one of the same ranks has left.
- *A broadcast of few bytes* ends when all ranks have come, so that a mismatch is raised on every rank. mpi4py's root
  goes on before.
- *Broadcasts that are begun together* were read one after another from the root's memory, and the root waited for each
  before it announced the next; mpi4py's are read without that. Two overlap since, which the tables do not show yet.
- *A scatter of blocks of 64 KiB to 1 MiB* is read by all ranks from the root's memory at once. On pages of 4 KiB the
  kernel makes such readers wait for one another; on pages of 2 MiB, as large arrays have, hardly. A root that copies
  all blocks itself was slower in every trial.
- *A gather of such blocks* ends when the root has copied all of them, as in mpi4py.
"""

SMALL_CALLS_LEGEND = """
## Short calls

All collectives, float32 and sum, beside plain mpi4py's blocking methods on the same buffers in the same job, one call
of each in turn between two barriers of MPI. A cell is mpi4py's time divided by ours, so more than 1 means that blinkmpi
is faster, and in brackets our time in microseconds; a barrier stands in the first column. Ranks wait for all others in
every call, which MPI's do only where the data demands it.

What is below the goal is bold, and above each table it is listed by what the time goes to:

- *The meeting of all ranks.* A short call ends when all ranks have announced it, so that a mismatch is raised on every
  rank in the same call. mpi4py's broadcast, gather, scatter, scan and exscan wait for fewer ranks or for none, and the
  barriers between the timed calls hide from them what that wait would cost later. With more ranks than cores, the
  meeting takes a turn of the scheduler, which is most of the time of such a call. Between hosts it is a message each
  way. A barrier waits for all in both libraries; there Python and the comparison of announcements add their part.
- *One copy.* Both libraries let the kernel copy each block from process to process, so there is little to gain; of an
  alltoall out of place, too.
- *Two copies through slots*, whose cache lines pass from core to core. A prefix sum or a reduction also waits for the
  ranks before it.
- *One message from host to host*, which carries announcement and data: whole vectors are folded, or copied into
  slots, before it is sent. mpi4py's call sends parts meanwhile, and in an alltoall or to a root it copies less.
- *Chunks along trees between hosts*: each chunk is a message of its own, and is copied into a slot and out of it.
- *MPI's non-blocking collective*, which is slower than its blocking one; only in it does our deadline hold.
"""

CALL_COST_LEGEND = """
## Cost of a call

Allreduces of tiny float32 tensors of as many different lengths, one after another in a cycle that repeats, beside plain
mpi4py in the same job. Times are microseconds per call; ratio is mpi4py's time divided by ours.
"""

TORCH_LEGEND = """
## torch.distributed

Collectives of `torch.distributed` on backend `blink` and on another one, on the same tensors of the same processes in
turn. Times are microseconds per call; ratio is the other backend's time divided by ours.
"""

TRAINING_LEGEND = """
## Training

Steps of DDP over each library in turn, on copies of one model ([how](../benchmarks/README.md#training)). Times are in
milliseconds: a step; the same step without communication (compute); what communication adds to it (exposed); and all
AllReduces of a step with nothing beside them (alone). Overlap is the part of those that the step hides. Ratios are a
library's time divided by that of backend `blink`, that of steps as on [the page of ratios](performance.md#pytorch).
`mpi` is plain mpi4py in a communication hook, `hook` backend `blink` with our `ddp_hook`. Weights apart is how far all
weights end from those of `blink` (Euclidean, as part of their length): sums of more than two ranks may round
differently. On links of a DGX-1V, which kernels pace to 45 GB/s a unit of NVLink, `blink` is our plan of that part of
it; `ring`, or `rings` and `trees`, are those that NCCL builds there, by our kernels, too.
"""

FSDP_LEGEND = """
## Sharded training

Steps of a transformer that `fully_shard` (FSDP2) shards, or DDP, over each library in turn, on copies of one model
([how](../benchmarks/README.md#training)); parameters are bfloat16 in the model's products, and gradients are summed in
the type of the row. Times are in milliseconds: a step by the GPU's events (on CPU ranks, by the host's clock), and of
one profiled turn what kernels of each kind took in a step on rank 0. A gate is the kernel of one warp that
[waits for all ranks](gpu.md#a-gate-before-long-calls) before a long call. Ratio is the first library's step divided by
the line's, round by round, with the median's 95 % interval. Losses apart is how far a step's loss is from that of the
first library at most, as a part of it.
"""

HOST_TIME_LEGEND = """
## Host time of GPU calls

Microseconds that the host needs to put an AllReduce in place on its stream: of the same tensor again and again, and
(new) of tensors that no call has seen yet. Ratio is NCCL's time, by torch's process group, divided by ours.
"""

GPU_MESSAGES_LEGEND = """
## Messages between GPUs

torch's sends and receives of plain bfloat16 tensors: in an exchange every rank sends to the next one and receives from
the one before, in a batch; one way each even rank sends to the next one. An alltoallv is `all_to_all_single` with split
sizes, of the same lengths in each turn or of new ones; size is what a rank sends. Experts are tokens of 7168 elements
that go to the ranks of their experts and back: ours with counts in GPU memory, NCCL's with an exchange of the counts
before, for which the host waits and which no graph can have. Times of a turn are in microseconds: on a stream, one turn
behind another; in a CUDA graph; and of the host, to put a turn on its streams. Ratio is NCCL's time, in torch's process
group, divided by ours.
"""

BESIDE_COMPUTE_LEGEND = """
## Matrix products beside AllReduces

Products of bfloat16 matrices on one stream of each GPU and AllReduces (sum, in place) on another, by ours and by NCCL
in turn, both limited to so many CTAs; products alone and AllReduces alone are measured in the same turns. Times of a
product and of an AllReduce are in microseconds. Slower is the time of one while both run, divided by that alone: 1
means that it takes no notice. Total is the time of a fixed amount of both, in milliseconds, and one after another what
the two alone add up to. Ratio is NCCL's total divided by ours: more than 1 means that products and AllReduces are
through earlier with blinkmpi.
"""

GROUPS_LEGEND = """
## Groups of small tensors

AllReduces of many small float32 tensors in one group, as one vector of their sum, and one call each; on GPUs also by
NCCL's group. Times are in microseconds; a ratio is the time of another way divided by the group's.
"""

ABLATION_LEGEND = """
## Mechanisms

Collectives on CPU ranks with a variable of the environment at some values, in jobs that took turns. Times are in
microseconds, each with its ratio to the time with the first value.
"""

HOSTS = """
## Several hosts
"""

HOSTS_LEGEND = """
Measured on namespaces of one machine: hosts with links of a given rate each way (`tc`) to a switch, and MPI's messages
over TCP between them. All ranks share that machine's cores, and nothing here was measured on a real network.

Times are in milliseconds, of float32, out of place unless it says otherwise. Wire is a plain Sendrecv of as many bytes
in the same job, both ways at once, between the first ranks of the first host and of another: the slowest of these. Rate
is what as many bytes take at the rate of the slowest host's links, both ways at once. A share is one of these times
divided by ours. Ratio is MPI's time divided by ours, also where MPI has to do without its component han, in a job of
its own. What fits into a link's burst of 256 KB is not slowed by its rate.
"""

NODES_LEGEND = """
## GPUs on virtual nodes

Measured on one machine whose GPUs are split into nodes that share nothing: our MPI and NCCL both have TCP sockets over
the loopback interface between these nodes, and no network. Columns are those of the GPUs above, but every call of ours
is through when it returns, and none is in a graph.

In the files named ipc our MPI takes GPU memory. It maps that of the other node, which no network would let it do, so
these are compared with nothing but our own calls on one node.
"""

CERTAINTY_LEGEND = """
## Certainty of predictions

What `bench --predict` says of calls on CPU ranks beside what they take ([how](certainty.md)). The jobs of the
collectives take turns; each times the steps of calls first, in vectors of other lengths. Bound, predicted and measured
times are medians over the jobs, the latter two with quartiles; the error is that of these medians, and last are the
quartiles of the errors of single jobs. The bound is what the passes over the bytes take at the rate of the fastest pass
that was timed at such a size.
"""

LANG_LEGEND = """
## Chunk programs

The algorithms of `blinkmpi.lang.library` on CPU ranks ([what they are](lang.md#the-library)), what a call takes by
default, and mpi4py's call, in turn on the same buffers, float32, sum, out of place. Times are in microseconds; a ratio
is the other one's time divided by the algorithm's, so more than 1 means that the algorithm is faster. Predicted is what
[the steps of calls](certainty.md) say, timed in the same job before; between virtual nodes the cost model says it, at
the rates that each communicator measures as it is opened, and knows nothing of ranks that share cores: short vectors,
whose messages wait for other ranks' turns, take many times as long. The bound is that of packed trees, at the rates of
the default's communicator, so a prediction may lie below it. A dash stands where nothing is predicted, as for one
message from node to node.
"""

TRACE_LEGEND = """
## Cost of a trace

Allreduces of a plain communicator, of one that measures times, and of one that is [traced](tracing.md), call by call in
turn. A ratio is the median over the turns of a time divided by the plain one's beside it, with its quartiles; the ratio
of the least times is that of the calls which nothing disturbed.
"""
