"""``blinkmpi bench``: nccl-tests' rows for our collectives, MPI's and NCCL's, side by side.

``command``       the benchmark on the ranks of a job; ``options`` its flags, ``nccl_tests`` their names
``time_host``     times a row on host memory, ``time_gpu`` on GPUs; ``timing`` has what both share
``peers``         the other libraries; ``layout`` where buffers lie, ``verification`` checks results
``document``      the JSON, also as older versions wrote it, with ``environment``; ``drawn_fields`` are drawn
``report``        the lines of text; ``plot_sizes`` draws them
``sweep/``        many jobs from one file
"""
