"""A collective call as a program of stages and channels: lowered from trees, proved, interpreted, priced. Pure.

``call``         which collective, how many elements of what type, by which root
``ir``           the program: channels and stages
``lower``        makes a program from a packing and a call; ``spans`` says where trees cut a vector
``one_shot``     makes one for short vectors on one memory; ``blocks`` says what moves where blocks differ
``template``     what of it is the same for every count; its spans are filled in
``by_count``     it as a function of its count: in place of numbers, sums of symbols
``check``        proves it: no deadlock, every contribution exactly once; ``in_place`` that it may run in place
``interpreter``  runs it for all ranks in one process, on NumPy
``cost_model``   predicts its time on the ways of ``routes``, ``estimate`` in closed form; ``timeline`` makes a trace
``partition``    the part of it that one node executes
``reduction``    element types, operations, accumulation and rounding
``memory``       pieces of host and GPU memory
"""
