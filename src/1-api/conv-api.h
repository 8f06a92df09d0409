/* ========================================================================== */
/* >>conv-api                                                MARK: - conv-api */
/* Convolutions, pooling and interpolation: ops, and convolutions as layers.  */
/* Needs: >>module-api.                                                       */
/* ========================================================================== */

/* -- convolutions ------------------------------------------------------------
 * Images are (N, C, H, W), in one dimension (N, C, L), as torch's without channels_last. Of the
 * arrays in descriptors, [0] is for the height and [1] for the width; in one dimension [0] is for the
 * length, and [1] is not read. */

typedef struct tsh_conv_options {
    int64_t stride[2];         /* 0: 1 */
    int64_t padding[2];        /* zeros before and after the image; 0: none */
    int64_t output_padding[2]; /* of a transposed convolution: rows, columns added at the end of the
                                * output; 0: none. Below stride or dilation */
    int64_t dilation[2];       /* elements from tap to tap of the kernel; 0: 1 */
    int64_t groups;            /* input channels and output channels are in so many groups, and an
                                * output channel sums over those of its group; 0: 1 */
} tsh_conv_options;

/* Returns the cross-correlation of x (N, in, L) with the weight (out, in / groups, K), plus bias
 * (out) or NULL: (N, out, L'), L' = (L + 2 padding - dilation (K - 1) - 1) / stride + 1, rounded
 * down. options NULL: all usual. Dtypes may differ: the result has x's; sums are in tsh_real, rounded
 * once. Layouts of x, weight -> result: R, R -> R; S(0), R -> S(0); P, R -> P without a bias; R,
 * S(0) -> S(1), column-parallel, with a bias S(0), and backward all-reduces dx; S(1) or R, S(1) ->
 * R, row-parallel, by one all-reduce in its dtype, after which the bias is added. With groups: S(1)
 * or R, S(0) -> S(1), if each rank has whole groups. Errors: TSH_ERR_SHAPE if the shapes do not fit or
 * nothing is left of the image, TSH_ERR_ARGUMENT, TSH_ERR_LAYOUT. Source: Dumoulin and Visin, "A
 * guide to convolution arithmetic for deep learning" (2016).
 * torch: F.conv1d */
TSH_API tsh_tensor *tsh_conv1d(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                               const tsh_conv_options *options);
/* Does what tsh_conv1d does in two dimensions: x (N, in, H, W), weight (out, in / groups, KH, KW),
 * result (N, out, H', W').
 * torch: F.conv2d */
TSH_API tsh_tensor *tsh_conv2d(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                               const tsh_conv_options *options);
/* Returns what is the gradient of a convolution's input, as a forward: x (N, in, L), weight (in, out
 * / groups, K), bias (out) or NULL, result (N, out, L'), L' = (L - 1) stride - 2 padding + dilation
 * (K - 1) + output_padding + 1. Layouts as tsh_conv1d, where the weight's dimensions of input and
 * output channels are the other way round: S(1) is column-parallel, S(0) row-parallel or, with
 * groups, by whole groups.
 * torch: F.conv_transpose1d */
TSH_API tsh_tensor *tsh_conv_transpose1d(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                         const tsh_conv_options *options);
/* Does what tsh_conv_transpose1d does in two dimensions: x (N, in, H, W), weight (in, out / groups,
 * KH, KW), result (N, out, H', W').
 * torch: F.conv_transpose2d */
TSH_API tsh_tensor *tsh_conv_transpose2d(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                         const tsh_conv_options *options);
