/* ========================================================================== */
/* >>conv-api                                                MARK: - conv-api */
/* Convolutions, pooling and interpolation: ops, and convolutions as layers.  */
/* Needs: >>module-api.                                                       */
/* ========================================================================== */

/* -- convolutions ------------------------------------------------------------
 * Images are (N, C, H, W): N images of C channels, row-major, as in torch without channels_last; in
 * one dimension (N, C, L). Of an array in a descriptor, [0] is for the height, [1] for the width;
 * in one dimension [0] is for the length, and [1] is not read. */

typedef struct tsh_conv_options {
    int64_t stride[2];         /* step of the kernel over the image; 0 means 1 */
    int64_t padding[2];        /* zeros before and after the image; 0: none */
    int64_t output_padding[2]; /* transposed convolutions: rows, columns added at the end of the
                                * output, fewer than stride or than dilation; 0: none */
    int64_t dilation[2];       /* distance between neighbouring kernel elements, in elements of the
                                * image; 0 means 1 */
    int64_t groups;            /* number of groups into which input and output channels are divided;
                                * an output channel sums over the input channels of its group only;
                                * 0 means 1 */
} tsh_conv_options;

/* Returns the cross-correlation of x (N, in, L) with the weight (out, in / groups, K), plus bias
 * (out) or NULL: (N, out, L'), L' = (L + 2 padding - dilation (K - 1) - 1) / stride + 1, rounded
 * down. options NULL: all 0. Dtypes may differ: the result has x's; sums are in tsh_real, rounded
 * once. Layouts of x, weight -> result: R, R -> R; S(0), R -> S(0); P, R -> P without a bias; R,
 * S(0) -> S(1), column-parallel, with a bias S(0), and backward all-reduces dx; S(1) or R, S(1) ->
 * R, row-parallel, by one all-reduce in its dtype, after which the bias is added. With groups: S(1)
 * or R, S(0) -> S(1), if each rank has whole groups. Errors: TSH_ERR_SHAPE if the shapes do not fit
 * or nothing is left of the image, TSH_ERR_ARGUMENT, TSH_ERR_LAYOUT. Source: Dumoulin and Visin, "A
 * guide to convolution arithmetic for deep learning" (2016).
 * torch: F.conv1d */
TSH_API tsh_tensor *tsh_conv1d(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                               const tsh_conv_options *options);
/* Does what tsh_conv1d does in two dimensions: x (N, in, H, W), weight (out, in / groups, KH, KW),
 * result (N, out, H', W').
 * torch: F.conv2d */
TSH_API tsh_tensor *tsh_conv2d(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                               const tsh_conv_options *options);
/* Returns the transposed convolution of x, the op by which the gradient of a convolution's input is
 * computed: x (N, in, L), weight (in, out / groups, K), bias (out) or NULL, result (N, out, L'), L'
 * = (L - 1) stride - 2 padding + dilation (K - 1) + output_padding + 1. Layouts as tsh_conv1d,
 * where the weight's dimensions of input and output channels are the other way round: S(1) is
 * column-parallel, S(0) row-parallel or, with groups, by whole groups.
 * torch: F.conv_transpose1d */
TSH_API tsh_tensor *tsh_conv_transpose1d(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                         const tsh_conv_options *options);
/* Does what tsh_conv_transpose1d does in two dimensions: x (N, in, H, W), weight (in, out / groups,
 * KH, KW), result (N, out, H', W').
 * torch: F.conv_transpose2d */
TSH_API tsh_tensor *tsh_conv_transpose2d(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                         const tsh_conv_options *options);

/* -- pooling, interpolation ----------------------------------------------------
 * x is (N, C, L) or (N, C, H, W); each channel is computed for itself. Layouts: the result has that
 * of x, R, S(0) or S(1), and P, too, except for the maximum, which is not linear. No collective
 * runs. */

typedef struct tsh_pool_options {
    int64_t kernel[2];            /* size of the window; must be given */
    int64_t stride[2];            /* distance from one window to the next; 0: kernel */
    int64_t padding[2];           /* elements added before and after the image, at most half of
                                   * kernel; 0: none */
    int64_t dilation[2];          /* maximum: distance between neighbouring elements of a window; 0
                                   * means 1 */
    int ceil_mode;                /* 1: the last window may extend beyond the end of the padded
                                   * image */
    tsh_choice count_include_pad; /* TSH_NO: a mean is that of the elements without the padding */
    int64_t divisor_override;     /* a mean's divisor; 0: the number of elements. (torch has it in
                                   * two dimensions only) */
} tsh_pool_options;

/* Returns the largest element of each window of x (N, C, L): (N, C, L'), L' = (L + 2 padding -
 * dilation (kernel - 1) - 1) / stride + 1, rounded down (ceil_mode: up, without a window that
 * begins in the padding at the end). NaN counts as largest. The gradient goes to the first largest
 * element. Errors: TSH_ERR_ARGUMENT, TSH_ERR_SHAPE if nothing is left.
 * torch: F.max_pool1d, nn.MaxPool1d */
TSH_API tsh_tensor *tsh_max_pool1d(tsh_tensor *x, const tsh_pool_options *options);
/* Does what tsh_max_pool1d does in two dimensions: x (N, C, H, W).
 * torch: F.max_pool2d, nn.MaxPool2d */
TSH_API tsh_tensor *tsh_max_pool2d(tsh_tensor *x, const tsh_pool_options *options);
/* Returns the mean of each window of x (N, C, L), where zeros of the padding count, unless
 * count_include_pad is TSH_NO. Shapes and errors as tsh_max_pool1d; dilation is 1.
 * torch: F.avg_pool1d, nn.AvgPool1d */
TSH_API tsh_tensor *tsh_avg_pool1d(tsh_tensor *x, const tsh_pool_options *options);
/* Does what tsh_avg_pool1d does in two dimensions: x (N, C, H, W).
 * torch: F.avg_pool2d, nn.AvgPool2d */
TSH_API tsh_tensor *tsh_avg_pool2d(tsh_tensor *x, const tsh_pool_options *options);
/* Returns (N, C, length) from x (N, C, L): element i is the mean of x's elements from i L / length,
 * rounded down, to (i + 1) L / length, rounded up. length is above 0.
 * torch: F.adaptive_avg_pool1d, nn.AdaptiveAvgPool1d */
TSH_API tsh_tensor *tsh_adaptive_avg_pool1d(tsh_tensor *x, int64_t length);
/* Does what tsh_adaptive_avg_pool1d does in two dimensions: x (N, C, H, W) to (N, C, height,
 * width).
 * torch: F.adaptive_avg_pool2d, nn.AdaptiveAvgPool2d */
TSH_API tsh_tensor *tsh_adaptive_avg_pool2d(tsh_tensor *x, int64_t height, int64_t width);

typedef enum tsh_interpolation {
    TSH_NEAREST, /* takes the element at or before the position */
    TSH_BILINEAR /* interpolates between the four nearest elements; in one dimension between two,
                  * torch's "linear" */
} tsh_interpolation;
typedef struct tsh_interpolate_options {
    int64_t size[2];        /* height and width, or length, of the result; 0: computed from scale */
    double scale[2];        /* ratio of the result's size to x's, by which positions are computed,
                             * too; 0: computed from size */
    tsh_interpolation mode;
    int align_corners;      /* 1, with BILINEAR: the centres of the corner elements of x and of the
                             * result coincide; 0: the outer edges of these elements do */
} tsh_interpolate_options;
/* Returns x (N, C, L) or (N, C, H, W) with another length or height and width: size, or x's times
 * scale, rounded down. TSH_ERR_ARGUMENT: for a dimension both of size and scale are given, or
 * neither; or the result would be empty.
 * torch: F.interpolate, nn.Upsample */
TSH_API tsh_tensor *tsh_interpolate(tsh_tensor *x, const tsh_interpolate_options *options);
/* Returns (N, C / factor^2, H factor, W factor) from x (N, C, H, W): element (c, y factor + i, x
 * factor + j) is that of channel (c factor + i) factor + j at (y, x). It calls tsh_reshape and
 * tsh_permute, whose rules for layouts hold here, too.
 * torch: F.pixel_shuffle, nn.PixelShuffle */
TSH_API tsh_tensor *tsh_pixel_shuffle(tsh_tensor *x, int64_t factor);

/* -- convolutions as layers ----------------------------------------------------- */

typedef struct tsh_conv_desc {
    int64_t in, out;           /* channels */
    int64_t kernel[2];         /* size of the kernel; must be given */
    int64_t stride[2];         /* as in tsh_conv_options, like the next four */
    int64_t padding[2];
    int64_t output_padding[2];
    int64_t dilation[2];
    int64_t groups;
    const tsh_layout *input;   /* layout that the input must have; NULL: that of the style */
    const tsh_layout *output;  /* layout of the output; NULL: that of the style */
    tsh_choice bias;           /* TSH_NO: no bias; TSH_USUAL: a bias */
    tsh_style style;           /* COLWISE: output channels are sharded (with groups: by whole
                                * groups); ROWWISE, only without groups: input channels are */
    int64_t unit;              /* number of channels that stay on one rank, a unit (tsh_segment); 0
                                * means 1, with groups a group */
    int gather_output;         /* 1, with COLWISE: the output is all-gathered to R */
    tsh_init weight_init;      /* default: KAIMING_UNIFORM with a = sqrt 5, as torch.nn.Conv2d */
    tsh_init bias_init;        /* default: UNIFORM in [-s, s), s = 1 / sqrt(fan_in) */
    tsh_dtype dtype;           /* dtype of the parameters; 0: tsh_desc.dtype */
} tsh_conv_desc;

/* Adds a layer y = tsh_conv1d(x, weight, bias), with weight (out, in / groups, kernel) and bias
 * (out), which plans shard as those of tsh_add_linear: COLWISE takes x R and gives S(1), ROWWISE
 * takes S(1) or R and gives R. With groups COLWISE takes S(1) or R. fan_in of the initial values:
 * in / groups times the kernel's elements.
 * torch: nn.Conv1d */
TSH_API tsh_module *tsh_add_conv1d(tsh_module *parent, const char *name, const tsh_conv_desc *desc);
/* Does what tsh_add_conv1d does in two dimensions: weight (out, in / groups, KH, KW).
 * torch: nn.Conv2d */
TSH_API tsh_module *tsh_add_conv2d(tsh_module *parent, const char *name, const tsh_conv_desc *desc);
/* Adds a layer y = tsh_conv_transpose1d(x, weight, bias), with weight (in, out / groups, kernel).
 * fan_in of the initial values: out / groups times the kernel's elements, as in torch.
 * torch: nn.ConvTranspose1d */
TSH_API tsh_module *tsh_add_conv_transpose1d(tsh_module *parent, const char *name,
                                             const tsh_conv_desc *desc);
/* Does what tsh_add_conv_transpose1d does in two dimensions: weight (in, out / groups, KH, KW).
 * torch: nn.ConvTranspose2d */
TSH_API tsh_module *tsh_add_conv_transpose2d(tsh_module *parent, const char *name,
                                             const tsh_conv_desc *desc);
