"""Grouped GEMM: rows of x in groups, each group times its own weight matrix. Its hooks are public here.

`tilecrew.grouped_gemm` is also the name of the function, so import from this package: `from tilecrew.grouped_gemm
import SwiGLU`.
"""

from tilecrew.grouped_gemm.hooks import GELU as GELU
from tilecrew.grouped_gemm.hooks import BandGate as BandGate
from tilecrew.grouped_gemm.hooks import Bias as Bias
from tilecrew.grouped_gemm.hooks import CountGate as CountGate
from tilecrew.grouped_gemm.hooks import Epilogue as Epilogue
from tilecrew.grouped_gemm.hooks import Gate as Gate
from tilecrew.grouped_gemm.hooks import Identity as Identity
from tilecrew.grouped_gemm.hooks import NoGate as NoGate
from tilecrew.grouped_gemm.hooks import NotifyRowBlock as NotifyRowBlock
from tilecrew.grouped_gemm.hooks import RouteWeight as RouteWeight
from tilecrew.grouped_gemm.hooks import SiLU as SiLU
from tilecrew.grouped_gemm.hooks import SwiGLU as SwiGLU
from tilecrew.grouped_gemm.schedule import max_row_blocks as max_row_blocks
