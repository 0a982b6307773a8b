"""Many benchmark jobs from one file, their results and their pictures.

``command`` puts it together: ``file`` says what to run, ``jobs`` starts a run, ``results`` keeps what it gave, and
``plot_scaling`` draws that against the number of nodes or ranks.
"""
