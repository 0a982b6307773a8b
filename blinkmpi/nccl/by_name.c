/* Empty: what programs that open NCCL by name may open in its place. Its first need is the library of count.c, its second is
 * NCCL itself, so a function of the first is found first, and NCCL's others behind it. */
