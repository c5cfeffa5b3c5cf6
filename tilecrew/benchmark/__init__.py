"""`tilecrew bench`: measured times beside those of other libraries, with errors from the same run.

cases.py      the problems, and the least time that the hardware allows for each
peers.py      other libraries' calls for the same problem
measure.py    runs, checks and times everything in turn
report.py     table, JSON, picture

and all of it for the grouped GEMM in grouped_gemm.py, for the mixture of experts in moe.py and the modules it names.
"""
