import ast
import importlib.util
from pathlib import Path

import pytest

import ligerprof
from ligerprof.analyzers.trace.times import KernelClass, kernel_class, short_name

ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>,"
    " std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
KNOWN = [
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", KernelClass.MATMUL),
    ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nt", KernelClass.MATMUL),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)", KernelClass.MATMUL),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(void)", KernelClass.MATMUL),
    ("triton_tem_fused_mm_12", KernelClass.MATMUL),
    ("triton_poi_fused_mul_silu_3", KernelClass.COMPILED),
    ("triton_red_fused__log_softmax_7", KernelClass.COMPILED),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4> >(Flash_fwd_params)", "attention"),
    ("fmha_cutlassB_bf16_aligned_64x64_k64_dropout_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_kernel0_0", "attention"),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)", KernelClass.ATTENTION),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", KernelClass.COMMUNICATION),
    ("Memcpy HtoD (Pageable -> Device)", KernelClass.COPY),
    ("Memset (Device)", KernelClass.COPY),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >",
        "copy",
    ),
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, 4>(int)", "copy"),
    ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIterator&)>", "copy"),
    (ELEMENTWISE, KernelClass.ELEMENTWISE),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float> > >", "reduction"),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)", "reduction"),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(float*)", "softmax_loss"),
    (
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
        "softmax_loss",
    ),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float> >", "optimizer"),
    ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)", KernelClass.INDEXING),
    ("void at::native::(anonymous namespace)::compute_grad_weight<c10::BFloat16, long>(long const*)", "indexing"),
    ("void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out>", "elementwise"),
    ("_cce_forward_kernel", KernelClass.FUSED),
    ("my_kernel", KernelClass.OTHER),
]


@pytest.mark.parametrize(("name", "kind"), KNOWN, ids=[name[:40] for name, _ in KNOWN])
def test_known_kernels_have_their_class(name: str, kind: KernelClass | str) -> None:
    assert kernel_class(name) == KernelClass(kind)


def triton_kernels(folder: Path, pattern: str) -> set[str]:
    """Names of launched @triton.jit functions; helpers called inside kernels have no `kernel` in theirs."""
    names = set()
    for path in folder.glob(pattern):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(item) for item in node.decorator_list):
                names.add(node.name)
    return {name for name in names if "kernel" in name}


def test_ligerprof_kernels_are_classified_as_fused() -> None:
    names = triton_kernels(Path(ligerprof.__file__).parent / "kernels", "**/*.py")
    assert len(names) >= 10
    assert {name: kernel_class(name) for name in names} == dict.fromkeys(names, KernelClass.FUSED)


def test_liger_kernels_are_classified_as_fused() -> None:
    spec = importlib.util.find_spec("liger_kernel")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("liger-kernel is not installed")
    names = triton_kernels(Path(spec.submodule_search_locations[0]) / "ops", "*.py")
    wanted = ("rms_norm", "swiglu", "geglu", "rope", "cross_entropy", "layer_norm", "element_mul")
    llama = {name for name in names if any(word in name for word in wanted)}
    assert len(llama) >= 10
    assert {name: kernel_class(name) for name in llama} == dict.fromkeys(llama, KernelClass.FUSED)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (ELEMENTWISE, "vectorized_elementwise_kernel"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>(float*)", "cunn_SoftMaxForward"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_nn_align1>(cutlass::Params)", "cutlass_80_simt_sgemm_nn_align1"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("_rms_fwd_kernel", "_rms_fwd_kernel"),
        ("at_cuda_detail::cub::detail::DeviceScanKernel<int>(long const*)", "DeviceScanKernel"),
        ("", ""),
        ("<<<", "<<<"),
    ],
    ids=lambda text: text[:30] or "empty",
)
def test_short_names_identify_the_kernel(name: str, short: str) -> None:
    assert short_name(name) == short
