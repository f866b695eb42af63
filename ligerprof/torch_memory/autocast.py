"""Which operators CUDA's autocast runs in fp32, in the widest of their types, or in its 16-bit type.

ATen/autocast_mode.h: AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_PROMOTE, and what
AT_FORALL_LOWER_PRECISION_FP has that a CPU's list lacks.
"""

# the operators of each list that occur in language models; losses of other kinds, convolutions and upsampling do not
FP32 = (
    "acos",
    "asin",
    "cosh",
    "cosine_similarity",
    "erfinv",
    "exp",
    "expm1",
    "group_norm",
    "kl_div",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "logsumexp",
    "mse_loss",
    "native_layer_norm",
    "nll_loss",
    "nll_loss2d",
    "pow.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "reciprocal",
    "rms_norm",
    "rsqrt",
    "sinh",
    "softplus",
    "tan",
)
FP32_RESULT = (
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "log_softmax.int",
    "prod",
    "prod.dim_int",
    "softmax.int",
    "sum",
    "sum.dim_IntList",
)
WIDEST = ("addcdiv", "addcmul", "atan2", "dot", "index_put", "scatter_add", "tensordot", "vdot")
LOWER = ("addmv", "addr", "einsum", "mv")
