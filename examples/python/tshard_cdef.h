/* Made from tshard.h and backends/tshard_threads.h by examples/python/make_cdef.py;
 * tests/consumer/test_python.py checks that it is up to date. */
#define TSHARD_VERSION_MAJOR 0
#define TSHARD_VERSION_MINOR 2
#define TSHARD_VERSION_PATCH 0
enum {
    TSH_MAX_DIMS = 6,
    TSH_MAX_SEGMENTS = 4,
    TSH_MESSAGE_SIZE = 512,
    TSH_PATH_SIZE = 192
};
typedef float tsh_real;
typedef enum tsh_result {
    TSH_OK, TSH_ERR_ARGUMENT, TSH_ERR_SHAPE, TSH_ERR_LAYOUT, TSH_ERR_DTYPE, TSH_ERR_MEMORY, TSH_ERR_STALE, TSH_ERR_STATE, TSH_ERR_MISMATCH, TSH_ERR_LOST, TSH_ERR_TIMEOUT, TSH_ERR_ABORTED, TSH_ERR_IO, TSH_ERR_UNSUPPORTED, TSH_ERR_ANOMALY,
        TSH_RESULT_COUNT
} tsh_result;
typedef struct tsh_error {
    tsh_result code;
    int rank;
    char message[TSH_MESSAGE_SIZE];
} tsh_error;
typedef enum tsh_dtype {
    TSH_DTYPE_DEFAULT,
    TSH_F32,
    TSH_F64,
    TSH_BF16,
    TSH_F16,
    TSH_I32,
    TSH_I64,
    TSH_Q8_0,
    TSH_Q4_0,
    TSH_Q4_1
} tsh_dtype;
typedef enum tsh_choice { TSH_USUAL, TSH_YES, TSH_NO } tsh_choice;
#define TSH_ZERO -1e-300
extern size_t tsh_dtype_size(tsh_dtype dtype);
typedef struct tsh_shape {
    int ndim;
    int64_t dim[TSH_MAX_DIMS];
} tsh_shape;
typedef void *(*tsh_allocator_fn)(void *ptr, size_t old_size, size_t new_size,
                                  size_t align, void *user);
typedef struct tsh_allocator {
    tsh_allocator_fn allocate;
    void *user;
} tsh_allocator;
typedef struct tsh_logger {
    void (*log)(const char *message, void *user);
    void *user;
} tsh_logger;
typedef void (*tsh_gemm_fn)(int64_t m, int64_t n, int64_t k, tsh_real alpha,
                            const tsh_real *a, int64_t rsa, int64_t csa, const tsh_real *b,
                            int64_t rsb, int64_t csb, tsh_real beta, tsh_real *c, int64_t rsc,
                            int64_t csc, int threads, void *user);
typedef struct tsh_gemm {
    tsh_gemm_fn multiply;
    void *user;
} tsh_gemm;
typedef struct tsh_ctx tsh_ctx;
typedef struct tsh_tensor tsh_tensor;
typedef struct tsh_module tsh_module;
typedef struct tsh_optim tsh_optim;
typedef struct tsh_outer tsh_outer;
typedef struct tsh_cache tsh_cache;
typedef struct tsh_pipeline tsh_pipeline;
typedef enum tsh_layout_kind {
    TSH_REPLICATED,
    TSH_SHARDED,
    TSH_PARTIAL
} tsh_layout_kind;
typedef struct tsh_segment {
    int64_t length;
    int64_t unit;
} tsh_segment;
typedef struct tsh_layout {
    tsh_layout_kind kind;
    int dim;
    int segments;
    tsh_segment segment[TSH_MAX_SEGMENTS];
} tsh_layout;
extern tsh_layout tsh_replicated(void);
extern tsh_layout tsh_partial(void);
extern tsh_layout tsh_sharded(int dim);
extern tsh_layout tsh_shard_units(int dim, int64_t unit);
extern tsh_layout tsh_shard_segments(int dim, int segments, int64_t unit);
typedef struct tsh_range {
    int64_t start, length;
} tsh_range;
extern int64_t tsh_shard_range(tsh_layout layout, int64_t length, int size, int rank,
                                tsh_range ranges[TSH_MAX_SEGMENTS]);
extern int64_t tsh_tp_shard_range(tsh_ctx *ctx, tsh_layout layout, int64_t length, int rank,
                                   tsh_range ranges[TSH_MAX_SEGMENTS]);
extern char *tsh_layout_text(tsh_layout layout, char *text, size_t size);
typedef enum tsh_coll_kind {
    TSH_ALLREDUCE,
    TSH_ALLGATHER,
    TSH_REDUCE_SCATTER,
    TSH_BROADCAST,
    TSH_ALLTOALL,
    TSH_SEND,
    TSH_RECV,
    TSH_SENDRECV,
    TSH_BARRIER,
    TSH_SPLIT,
    TSH_COLL_KINDS
} tsh_coll_kind;
typedef enum tsh_redop { TSH_SUM, TSH_PROD, TSH_MIN, TSH_MAX, TSH_AVG } tsh_redop;
typedef struct tsh_coll {
    uint32_t size;
    tsh_coll_kind kind;
    tsh_dtype dtype;
    tsh_redop redop;
    const void *send;
    void *recv;
    int64_t count;
    const int64_t *send_counts, *recv_counts;
    int64_t blocks;
    int root, send_to, recv_from, tag;
    uint64_t seq;
    int64_t timeout_ns;
} tsh_coll;
typedef uint64_t tsh_req;
typedef struct tsh_comm tsh_comm;
enum {
    TSH_COMM_ABI = 1,
    TSH_MESSAGE_BYTES = 32768,
    TSH_CAP_ORDERED = 1,
    TSH_CAP_DEATH = 2
};
typedef struct tsh_comm_ops {
    uint32_t size, abi;
    const char *name;
    uint64_t caps;
    tsh_result (*start)(tsh_comm *comm, const tsh_coll *coll, tsh_req *req);
    tsh_result (*test)(tsh_comm *comm, tsh_req req, int *done);
    tsh_result (*wait)(tsh_comm *comm, tsh_req req);
    void (*progress)(tsh_comm *comm);
    tsh_result (*split)(tsh_comm *comm, int color, int key, tsh_comm *out);
    tsh_result (*status)(tsh_comm *comm, tsh_error *error);
    void (*abort)(tsh_comm *comm, const tsh_error *why);
    void (*close)(tsh_comm *comm);
    void (*idle)(tsh_comm *comm,
                 int64_t ns);
    tsh_result (*receive)(tsh_comm *comm, tsh_req req);
    tsh_result (*lend)(tsh_comm *comm, tsh_req req, const void **values);
} tsh_comm_ops;
typedef struct tsh_comm_stats {
    uint64_t calls[TSH_COLL_KINDS];
    uint64_t bytes[TSH_COLL_KINDS];
} tsh_comm_stats;
struct tsh_comm {
    const tsh_comm_ops *ops;
    void *impl;
    int rank, size;
    uint64_t id;
    uint64_t next_seq;
    int in_flight;
    int caller;
    tsh_comm_stats stats;
    struct tshi_trace *trace;
    tsh_ctx *unchecked;
};
extern tsh_result tsh_allreduce(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                 tsh_redop op);
extern tsh_result tsh_allgather(tsh_comm *comm, const void *send, void *recv,
                                 const int64_t *counts, int64_t blocks, tsh_dtype dtype);
extern tsh_result tsh_reduce_scatter(tsh_comm *comm, const void *send, void *recv,
                                      const int64_t *counts, int64_t blocks, tsh_dtype dtype,
                                      tsh_redop op);
extern tsh_result tsh_broadcast(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                 int root);
extern tsh_result tsh_alltoall(tsh_comm *comm, const void *send, const int64_t *send_counts,
                                void *recv, const int64_t *recv_counts, int64_t blocks,
                                tsh_dtype dtype);
extern tsh_result tsh_send(tsh_comm *comm, const void *buffer, int64_t count, tsh_dtype dtype,
                            int to);
extern tsh_result tsh_recv(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype, int from);
extern tsh_result tsh_sendrecv(tsh_comm *comm, const void *send, int64_t send_count, int to,
                                void *recv, int64_t recv_count, int from, tsh_dtype dtype);
extern tsh_result tsh_barrier(tsh_comm *comm);
extern tsh_coll tsh_coll_make(tsh_coll_kind kind, tsh_dtype dtype);
extern tsh_result tsh_start(tsh_comm *comm, tsh_coll *coll, tsh_req *req);
extern tsh_result tsh_test(tsh_comm *comm, tsh_req req, int *done);
extern tsh_result tsh_wait(tsh_comm *comm, tsh_req req);
extern tsh_result tsh_allreduce_start(tsh_comm *comm, void *buffer, int64_t count, tsh_dtype dtype,
                                       tsh_redop op, tsh_req *req);
extern void tsh_comm_progress(tsh_comm *comm);
extern tsh_result tsh_comm_split(tsh_comm *comm, int color, int key, tsh_comm *out);
extern tsh_result tsh_comm_error(tsh_comm *comm, tsh_error *error);
extern void tsh_comm_abort(tsh_comm *comm, tsh_result code, const char *message);
extern void tsh_comm_close(tsh_comm *comm);
extern const char *tsh_version(void);
extern const char *tsh_cpu_text(const tsh_ctx *ctx);
extern const char *tsh_result_name(tsh_result code);
extern const char *tsh_result_text(tsh_result code);
extern int tsh_ok(tsh_ctx *ctx);
extern const tsh_error *tsh_last_error(const tsh_ctx *ctx);
extern void tsh_clear_error(tsh_ctx *ctx);
extern tsh_result tsh_fail(tsh_ctx *ctx, tsh_result code, const char *format, ...)
    ;
typedef struct tsh_place {
    const char *file;
    int line;
} tsh_place;
extern tsh_place tsh_set_place(tsh_ctx *ctx, const char *file, int line);
extern void tsh_log_stderr(const char *message, void *user);
extern void tsh_log_message(const tsh_logger *logger, const char *format, ...) ;
extern tsh_result tsh_error_set(tsh_error *error, tsh_result code, int rank, const char *format,
                                 ...) ;
extern void tsh_text_add(char *text, size_t capacity, const char *format, ...) ;
extern int64_t tsh_now(void);
typedef enum tsh_mem_kind {
    TSH_MEM_PARAMETERS,
    TSH_MEM_GRADIENTS,
    TSH_MEM_OPTIMISER,
    TSH_MEM_TENSORS,
    TSH_MEM_STEP,
    TSH_MEM_BOOKS,
    TSH_MEM_KINDS
} tsh_mem_kind;
typedef struct tsh_mem {
    size_t now[TSH_MEM_KINDS], peak[TSH_MEM_KINDS];
    size_t total, total_peak, step_live, step_live_peak;
    uint64_t calls;
} tsh_mem;
extern tsh_mem tsh_mem_stats(const tsh_ctx *ctx);
extern void tsh_dry_run(tsh_ctx *ctx, int on);
typedef struct tsh_desc {
    tsh_comm comm;
    int tp, pp;
    const char *order;
    uint64_t seed;
    int threads;
    tsh_gemm gemm;
    tsh_allocator allocator;
    tsh_logger logger;
    size_t bucket_bytes;
    int no_overlap;
    tsh_dtype dtype;
    const int *shares;
    tsh_dtype wire;
} tsh_desc;
extern tsh_result tsh_open(const tsh_desc *desc, tsh_ctx **out);
extern tsh_result tsh_open_built(int version, size_t real, size_t size, const tsh_desc *desc,
                                  tsh_ctx **out);
extern void tsh_close(tsh_ctx *ctx);
extern tsh_comm *tsh_world(tsh_ctx *ctx);
extern tsh_comm *tsh_tp(tsh_ctx *ctx);
extern tsh_comm *tsh_pp(tsh_ctx *ctx);
extern tsh_comm *tsh_dp(tsh_ctx *ctx);
extern int tsh_run(const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user), void *user);
extern int tsh_run_built(int version, size_t real, size_t size, const tsh_desc *desc,
                          int (*fn)(tsh_ctx *ctx, void *user), void *user);
extern int tsh_run_on(tsh_comm *comm, const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                       void *user, tsh_error *error);
extern int tsh_run_on_built(int version, size_t real, size_t size, tsh_comm *comm,
                             const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user), void *user,
                             tsh_error *error);
extern tsh_shape tsh_shape0(void);
extern tsh_shape tsh_shape1(int64_t a);
extern tsh_shape tsh_shape2(int64_t a, int64_t b);
extern tsh_shape tsh_shape3(int64_t a, int64_t b, int64_t c);
extern tsh_shape tsh_shape4(int64_t a, int64_t b, int64_t c, int64_t d);
extern tsh_tensor *tsh_tensor_new(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape,
                                   tsh_layout layout);
extern tsh_tensor *tsh_tensor_from(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape,
                                    tsh_layout layout, const void *data);
extern void tsh_tensor_free(tsh_tensor *t);
extern tsh_tensor *tsh_zeros(tsh_ctx *ctx, tsh_shape shape);
extern tsh_tensor *tsh_ones(tsh_ctx *ctx, tsh_shape shape);
extern tsh_tensor *tsh_full(tsh_ctx *ctx, tsh_shape shape, double value);
extern tsh_tensor *tsh_arange(tsh_ctx *ctx, tsh_dtype dtype, double start, double stop,
                               double step);
extern tsh_tensor *tsh_randn(tsh_ctx *ctx, tsh_shape shape);
extern tsh_tensor *tsh_uniform(tsh_ctx *ctx, tsh_shape shape, double low, double high);
extern tsh_ctx *tsh_ctx_of(const tsh_tensor *t);
extern tsh_dtype tsh_dtype_of(const tsh_tensor *t);
extern int tsh_ndim(const tsh_tensor *t);
extern tsh_shape tsh_shape_of(const tsh_tensor *t);
extern int64_t tsh_size(const tsh_tensor *t, int dim);
extern int64_t tsh_local_size(const tsh_tensor *t, int dim);
extern int64_t tsh_stride(const tsh_tensor *t, int dim);
extern int64_t tsh_numel(const tsh_tensor *t);
extern int64_t tsh_local_numel(const tsh_tensor *t);
extern tsh_layout tsh_layout_of(const tsh_tensor *t);
extern void *tsh_data(tsh_ctx *ctx, tsh_tensor *t);
extern double tsh_item(tsh_ctx *ctx, tsh_tensor *t);
typedef enum tsh_init_kind {
    TSH_INIT_DEFAULT,
    TSH_INIT_ZEROS,
    TSH_INIT_ONES,
    TSH_INIT_CONSTANT,
    TSH_INIT_UNIFORM,
    TSH_INIT_NORMAL,
    TSH_INIT_KAIMING_UNIFORM,
    TSH_INIT_TRUNC_NORMAL,
    TSH_INIT_KAIMING_NORMAL,
    TSH_INIT_XAVIER_UNIFORM,
    TSH_INIT_XAVIER_NORMAL,
    TSH_INIT_ORTHOGONAL,
    TSH_INIT_DIRAC
} tsh_init_kind;
typedef struct tsh_init {
    tsh_init_kind kind;
    double a, b;
    double gain;
    int fan_out;
    double low, high;
} tsh_init;
extern tsh_result tsh_init_uniform(tsh_tensor *t, const tsh_init *desc);
extern tsh_result tsh_init_normal(tsh_tensor *t, const tsh_init *desc);
extern tsh_result tsh_init_trunc_normal(tsh_tensor *t, const tsh_init *desc);
extern tsh_result tsh_init_constant(tsh_tensor *t, const tsh_init *desc);
extern tsh_result tsh_init_zeros(tsh_tensor *t, const tsh_init *desc);
extern tsh_result tsh_init_ones(tsh_tensor *t, const tsh_init *desc);
extern tsh_result tsh_init_kaiming_uniform(tsh_tensor *t, const tsh_init *desc);
extern tsh_result tsh_init_kaiming_normal(tsh_tensor *t, const tsh_init *desc);
extern tsh_result tsh_init_xavier_uniform(tsh_tensor *t, const tsh_init *desc);
extern tsh_result tsh_init_xavier_normal(tsh_tensor *t, const tsh_init *desc);
extern tsh_result tsh_init_orthogonal(tsh_tensor *t, const tsh_init *desc);
extern tsh_result tsh_init_dirac(tsh_tensor *t, const tsh_init *desc);
extern void tsh_no_grad_begin(tsh_ctx *ctx);
extern void tsh_no_grad_end(tsh_ctx *ctx);
extern tsh_tensor *tsh_requires_grad(tsh_tensor *t, int on);
extern tsh_tensor *tsh_average_grad(tsh_tensor *t, int on);
extern tsh_tensor *tsh_retain_grad(tsh_tensor *t);
typedef struct tsh_backward_desc {
    int defer;
    int summed;
    double weight;
} tsh_backward_desc;
extern tsh_result tsh_backward(tsh_ctx *ctx, tsh_tensor *loss);
extern tsh_result tsh_backward_with(tsh_ctx *ctx, tsh_tensor *loss, const tsh_backward_desc *desc);
extern tsh_result tsh_sync_grads(tsh_ctx *ctx);
extern tsh_tensor *tsh_grad(tsh_tensor *t);
extern void tsh_zero_grad(tsh_tensor *t);
extern tsh_result tsh_tape_dump(tsh_ctx *ctx, FILE *file);
extern tsh_result tsh_tape_dot(tsh_ctx *ctx, FILE *file);
extern void tsh_detect_anomaly(tsh_ctx *ctx, int on);
extern tsh_result tsh_step_end(tsh_ctx *ctx);
extern void tsh_scope_begin(tsh_ctx *ctx);
extern void tsh_scope_end(tsh_ctx *ctx);
extern tsh_tensor *tsh_from(tsh_ctx *ctx, const void *data, tsh_shape shape, tsh_dtype dtype);
typedef struct tsh_sampler {
    int64_t count;
    int64_t batch;
    tsh_choice shuffle;
    int drop_last;
    uint64_t seed;
    int64_t epoch, at;
    int64_t first, mine;
} tsh_sampler;
extern int64_t tsh_sampler_next(tsh_ctx *ctx, tsh_sampler *sampler);
extern int64_t tsh_sampler_index(tsh_ctx *ctx, const tsh_sampler *sampler, int64_t i);
extern void tsh_check_inputs(tsh_ctx *ctx, int on);
extern tsh_tensor *tsh_add(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_sub(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_mul(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_div(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_pow(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_neg(tsh_tensor *x);
extern tsh_tensor *tsh_scale(tsh_tensor *x, double factor);
extern tsh_tensor *tsh_add_scalar(tsh_tensor *x, double term);
extern tsh_tensor *tsh_pow_scalar(tsh_tensor *x, double exponent);
extern tsh_tensor *tsh_maximum(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_minimum(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_clamp(tsh_tensor *x, double min, double max);
extern tsh_tensor *tsh_exp(tsh_tensor *x);
extern tsh_tensor *tsh_expm1(tsh_tensor *x);
extern tsh_tensor *tsh_log(tsh_tensor *x);
extern tsh_tensor *tsh_log1p(tsh_tensor *x);
extern tsh_tensor *tsh_sqrt(tsh_tensor *x);
extern tsh_tensor *tsh_rsqrt(tsh_tensor *x);
extern tsh_tensor *tsh_reciprocal(tsh_tensor *x);
extern tsh_tensor *tsh_sin(tsh_tensor *x);
extern tsh_tensor *tsh_cos(tsh_tensor *x);
extern tsh_tensor *tsh_abs(tsh_tensor *x);
extern tsh_tensor *tsh_sign(tsh_tensor *x);
extern tsh_tensor *tsh_floor(tsh_tensor *x);
extern tsh_tensor *tsh_ceil(tsh_tensor *x);
extern tsh_tensor *tsh_round(tsh_tensor *x);
extern tsh_tensor *tsh_erf(tsh_tensor *x);
extern tsh_tensor *tsh_sigmoid(tsh_tensor *x);
extern tsh_tensor *tsh_tanh(tsh_tensor *x);
extern tsh_tensor *tsh_relu(tsh_tensor *x);
extern tsh_tensor *tsh_relu6(tsh_tensor *x);
extern tsh_tensor *tsh_gelu(tsh_tensor *x);
extern tsh_tensor *tsh_gelu_tanh(tsh_tensor *x);
extern tsh_tensor *tsh_silu(tsh_tensor *x);
extern tsh_tensor *tsh_mish(tsh_tensor *x);
extern tsh_tensor *tsh_selu(tsh_tensor *x);
extern tsh_tensor *tsh_hardsigmoid(tsh_tensor *x);
extern tsh_tensor *tsh_hardswish(tsh_tensor *x);
extern tsh_tensor *tsh_log_sigmoid(tsh_tensor *x);
extern tsh_tensor *tsh_softplus(tsh_tensor *x, double beta);
extern tsh_tensor *tsh_elu(tsh_tensor *x, double alpha);
extern tsh_tensor *tsh_leaky_relu(tsh_tensor *x, double slope);
extern tsh_tensor *tsh_eq(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_ne(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_lt(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_le(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_gt(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_ge(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_where(tsh_tensor *cond, tsh_tensor *yes, tsh_tensor *no);
extern tsh_tensor *tsh_masked_fill(tsh_tensor *x, tsh_tensor *mask, double value);
extern tsh_tensor *tsh_cast(tsh_tensor *x, tsh_dtype dtype);
extern tsh_tensor *tsh_dropout(tsh_tensor *x, double p, tsh_module *owner);
extern tsh_tensor *tsh_clone(tsh_tensor *x);
extern tsh_tensor *tsh_detach(tsh_tensor *x);
extern tsh_tensor *tsh_keep(const tsh_tensor *t);
enum { TSH_ALL = -1000 };
extern tsh_tensor *tsh_sum(tsh_tensor *x, int dim, int keepdim);
extern tsh_tensor *tsh_mean(tsh_tensor *x, int dim, int keepdim);
extern tsh_tensor *tsh_max(tsh_tensor *x, int dim, int keepdim);
extern tsh_tensor *tsh_min(tsh_tensor *x, int dim, int keepdim);
extern tsh_tensor *tsh_argmax(tsh_tensor *x, int dim, int keepdim);
extern tsh_tensor *tsh_argmin(tsh_tensor *x, int dim, int keepdim);
extern tsh_tensor *tsh_logsumexp(tsh_tensor *x, int dim, int keepdim);
extern tsh_tensor *tsh_var(tsh_tensor *x, int dim, double correction, int keepdim);
extern tsh_tensor *tsh_std(tsh_tensor *x, int dim, double correction, int keepdim);
extern tsh_tensor *tsh_norm(tsh_tensor *x, double p, int dim, int keepdim);
extern tsh_tensor *tsh_prod(tsh_tensor *x, int dim, int keepdim);
extern tsh_tensor *tsh_cumsum(tsh_tensor *x, int dim);
extern tsh_tensor *tsh_softmax(tsh_tensor *x, int dim);
extern tsh_tensor *tsh_log_softmax(tsh_tensor *x, int dim);
extern tsh_tensor *tsh_reshape(tsh_tensor *x, tsh_shape shape);
extern tsh_tensor *tsh_transpose(tsh_tensor *x, int dim0, int dim1);
extern tsh_tensor *tsh_permute(tsh_tensor *x, const int *dims);
extern tsh_tensor *tsh_slice(tsh_tensor *x, int dim, int64_t start, int64_t length);
extern tsh_result tsh_split(tsh_tensor *x, int dim, int n, tsh_tensor **parts);
extern tsh_tensor *tsh_concat(tsh_tensor *const *parts, int n, int dim);
extern tsh_tensor *tsh_redistribute(tsh_tensor *x, tsh_layout layout);
extern tsh_tensor *tsh_full_tensor(tsh_tensor *x);
extern tsh_tensor *tsh_set_layout(tsh_tensor *t, tsh_layout layout);
extern tsh_tensor *tsh_tp_copy(tsh_tensor *x, tsh_redop op);
extern tsh_tensor *tsh_tp_reduce(tsh_tensor *x, tsh_redop op);
extern tsh_tensor *tsh_tp_scatter(tsh_tensor *x, int dim);
extern tsh_tensor *tsh_tp_gather(tsh_tensor *x, int dim);
extern tsh_result tsh_broadcast_batch(tsh_tensor *t);
typedef enum tsh_extent { TSH_LOCAL, TSH_GLOBAL } tsh_extent;
extern tsh_result tsh_read(tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent, void *out,
                            size_t bytes);
extern tsh_result tsh_write(tsh_ctx *ctx, tsh_tensor *t, tsh_extent extent, const void *in,
                             size_t bytes);
extern char *tsh_to_string(tsh_tensor *t, char *text, size_t size);
extern tsh_tensor *tsh_matmul(tsh_tensor *a, tsh_tensor *b);
extern tsh_tensor *tsh_linear(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias);
typedef struct tsh_lookup_desc {
    int padding;
    int64_t padding_idx;
    double max_norm;
    double norm_type;
    int scale_grad_by_freq;
    int sparse;
} tsh_lookup_desc;
extern tsh_tensor *tsh_embedding(tsh_tensor *ids, tsh_tensor *weight, const tsh_lookup_desc *desc);
extern tsh_tensor *tsh_layer_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias, double eps);
extern tsh_tensor *tsh_rms_norm(tsh_tensor *x, tsh_tensor *weight, double eps);
typedef struct tsh_rms_norm_desc {
    int64_t dim;
    double eps;
    int plus_one;
    tsh_dtype dtype;
} tsh_rms_norm_desc;
extern tsh_tensor *tsh_rms_norm_with(tsh_tensor *x, tsh_tensor *weight,
                                      const tsh_rms_norm_desc *desc);
typedef struct tsh_rope_desc {
    double base;
    int64_t dims;
    int interleaved;
    int64_t start;
    const double *freqs;
    double factor;
    const int64_t *starts;
} tsh_rope_desc;
extern tsh_tensor *tsh_rope(tsh_tensor *x, const tsh_rope_desc *desc);
typedef struct tsh_attention_desc {
    int causal;
    double scale;
    double dropout;
    tsh_module *owner;
    tsh_tensor *mask;
    tsh_tensor *cache_k, *cache_v;
    int64_t past;
    const int64_t *pasts;
    const int64_t *lengths;
    int64_t window;
    double soft_cap;
    tsh_tensor *sinks;
    tsh_tensor *segments;
} tsh_attention_desc;
extern tsh_tensor *tsh_attention(tsh_tensor *q, tsh_tensor *k, tsh_tensor *v,
                                  const tsh_attention_desc *desc);
typedef enum tsh_reduction {
    TSH_REDUCE_MEAN,
    TSH_REDUCE_SUM,
    TSH_REDUCE_NONE,
    TSH_REDUCE_BATCHMEAN
} tsh_reduction;
typedef struct tsh_cross_entropy_desc {
    tsh_reduction reduction;
    int ignore;
    int64_t ignore_index;
    int empty_zero;
    double label_smoothing;
    double z_loss;
    tsh_tensor *weight;
    int dim;
} tsh_cross_entropy_desc;
extern tsh_tensor *tsh_cross_entropy(tsh_tensor *logits, tsh_tensor *target,
                                      const tsh_cross_entropy_desc *desc);
typedef tsh_tensor *(*tsh_chunk_fn)(tsh_tensor *x, tsh_tensor *target, void *user);
typedef struct tsh_chunks_desc {
    tsh_chunk_fn fn;
    void *user;
    int64_t rows;
} tsh_chunks_desc;
extern tsh_tensor *tsh_loss_in_chunks(tsh_tensor *x, tsh_tensor *target,
                                       const tsh_chunks_desc *desc);
typedef struct tsh_sample_desc {
    double penalty;
    tsh_tensor *previous;
    double temperature;
    int64_t top_k;
    double top_p;
    double min_p;
    uint64_t seed;
    int64_t position;
} tsh_sample_desc;
extern tsh_tensor *tsh_sample(tsh_tensor *logits, const tsh_sample_desc *desc);
enum { TSH_MAX_OUTPUTS = 8 };
typedef struct tsh_output {
    tsh_shape shape;
    tsh_layout layout;
    tsh_dtype dtype;
} tsh_output;
typedef struct tsh_custom_op_desc {
    const char *name;
    int outputs;
    tsh_output out[TSH_MAX_OUTPUTS];
    unsigned partial;
    void (*forward)(tsh_tensor *const *in, int n, void *const *out, void *user);
    void (*backward)(tsh_tensor *const *in, int n, const void *const *out,
                     const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user);
    void *user;
} tsh_custom_op_desc;
extern tsh_tensor *tsh_custom_op(tsh_ctx *ctx, tsh_tensor *const *in, int n, tsh_tensor **out,
                                  const tsh_custom_op_desc *desc);
typedef struct tsh_loss_desc {
    tsh_reduction reduction;
    tsh_tensor *weight;
    tsh_tensor *pos_weight;
    double delta;
    double beta;
    int log_target;
    int ignore;
    int64_t ignore_index;
    int dim;
} tsh_loss_desc;
extern tsh_tensor *tsh_mse_loss(tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc);
extern tsh_tensor *tsh_l1_loss(tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc);
extern tsh_tensor *tsh_huber_loss(tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc);
extern tsh_tensor *tsh_smooth_l1_loss(tsh_tensor *x, tsh_tensor *target,
                                       const tsh_loss_desc *desc);
extern tsh_tensor *tsh_binary_cross_entropy(tsh_tensor *x, tsh_tensor *target,
                                             const tsh_loss_desc *desc);
extern tsh_tensor *tsh_binary_cross_entropy_with_logits(tsh_tensor *x, tsh_tensor *target,
                                                         const tsh_loss_desc *desc);
extern tsh_tensor *tsh_kl_div(tsh_tensor *x, tsh_tensor *target, const tsh_loss_desc *desc);
extern tsh_tensor *tsh_nll_loss(tsh_tensor *log_probs, tsh_tensor *target,
                                 const tsh_loss_desc *desc);
extern tsh_tensor *tsh_cosine_similarity(tsh_tensor *a, tsh_tensor *b, int dim, double eps);
extern tsh_tensor *tsh_stack(tsh_tensor *const *parts, int n, int dim);
extern tsh_tensor *tsh_squeeze(tsh_tensor *x, int dim);
extern tsh_tensor *tsh_unsqueeze(tsh_tensor *x, int dim);
extern tsh_tensor *tsh_expand(tsh_tensor *x, tsh_shape shape);
extern tsh_tensor *tsh_tile(tsh_tensor *x, const int64_t *repeats, int n);
extern tsh_tensor *tsh_repeat_interleave(tsh_tensor *x, int64_t repeats, int dim);
typedef enum tsh_pad_mode {
    TSH_PAD_CONSTANT,
    TSH_PAD_REFLECT,
    TSH_PAD_REPLICATE,
    TSH_PAD_CIRCULAR
} tsh_pad_mode;
extern tsh_tensor *tsh_pad(tsh_tensor *x, const int64_t *pad, int n, tsh_pad_mode mode,
                            double value);
extern tsh_tensor *tsh_flip(tsh_tensor *x, int dim);
extern tsh_tensor *tsh_roll(tsh_tensor *x, int64_t shift, int dim);
extern tsh_tensor *tsh_slice_step(tsh_tensor *x, int dim, int64_t start, int64_t stop,
                                   int64_t step);
extern tsh_tensor *tsh_tril(tsh_tensor *x, int64_t diagonal);
extern tsh_tensor *tsh_triu(tsh_tensor *x, int64_t diagonal);
extern tsh_tensor *tsh_one_hot(tsh_tensor *ids, int64_t classes);
extern tsh_tensor *tsh_gather(tsh_tensor *x, int dim, tsh_tensor *index);
extern tsh_tensor *tsh_scatter_add(tsh_tensor *x, int dim, tsh_tensor *index, tsh_tensor *src);
extern tsh_tensor *tsh_index_select(tsh_tensor *x, int dim, tsh_tensor *index);
extern tsh_tensor *tsh_topk(tsh_tensor *x, int64_t k, int dim, int largest, tsh_tensor **indices);
extern tsh_tensor *tsh_sort(tsh_tensor *x, int dim, int descending, tsh_tensor **indices);
extern tsh_tensor *tsh_argsort(tsh_tensor *x, int dim, int descending);
extern tsh_tensor *tsh_einsum(const char *equation, tsh_tensor *a, tsh_tensor *b);
typedef tsh_tensor *(*tsh_forward_fn)(tsh_module *module, tsh_tensor **in, int n, void *user);
typedef enum tsh_style {
    TSH_PLAIN,
    TSH_COLWISE,
    TSH_ROWWISE,
    TSH_AUTO,
    TSH_SEQUENCE,
    TSH_PREPARE_INPUT,
    TSH_PREPARE_OUTPUT,
    TSH_STYLES
} tsh_style;
typedef struct tsh_module_desc {
    tsh_forward_fn forward;
    void *user;
} tsh_module_desc;
typedef struct tsh_linear_desc {
    int64_t in, out;
    const tsh_layout *input;
    const tsh_layout *output;
    tsh_choice bias;
    tsh_style style;
    int segments;
    int64_t unit;
    int gather_output;
    int skip_bias_add;
    int reversed;
    int regather;
    tsh_init weight_init;
    tsh_init bias_init;
    tsh_dtype dtype;
} tsh_linear_desc;
typedef struct tsh_classifier_desc {
    int64_t in, classes;
    tsh_tensor *weight;
    const tsh_layout *input;
    tsh_choice bias;
    tsh_style style;
    int gather_output;
    tsh_init weight_init;
    tsh_init bias_init;
    tsh_dtype dtype;
} tsh_classifier_desc;
typedef struct tsh_embedding_desc {
    int64_t count, dim;
    tsh_style style;
    const tsh_layout *output;
    tsh_init init;
    tsh_lookup_desc lookup;
    tsh_tensor *weight;
    tsh_dtype dtype;
} tsh_embedding_desc;
typedef struct tsh_layer_norm_desc {
    int64_t dim;
    double eps;
    tsh_dtype dtype;
    tsh_choice bias;
} tsh_layer_norm_desc;
typedef struct tsh_param_desc {
    tsh_init init;
    const tsh_layout *layout;
    int buffer;
    tsh_dtype dtype;
} tsh_param_desc;
extern tsh_module *tsh_root(tsh_ctx *ctx);
extern tsh_module *tsh_add_module(tsh_module *parent, const char *name,
                                   const tsh_module_desc *desc);
extern tsh_module *tsh_find(tsh_module *module, const char *path);
extern tsh_tensor *tsh_param(tsh_module *module, const char *path);
extern void tsh_each_param(tsh_module *module,
                            void (*fn)(const char *path, tsh_tensor *param, void *user),
                            void *user);
extern tsh_ctx *tsh_module_ctx(const tsh_module *module);
extern const char *tsh_module_path(const tsh_module *module);
extern tsh_module *tsh_child(const tsh_module *module, int index);
extern tsh_result tsh_tie(tsh_module *module, const char *name, tsh_tensor *source);
extern tsh_result tsh_materialize(tsh_module *module);
extern tsh_result tsh_reset_parameters(tsh_module *module);
extern tsh_result tsh_to(tsh_module *module, tsh_dtype dtype);
extern void tsh_train(tsh_module *module, int on);
extern int tsh_training(const tsh_module *module);
extern void tsh_checkpoint(tsh_module *module, int on);
extern void tsh_zero_grads(tsh_module *module);
extern size_t tsh_rng_state(tsh_ctx *ctx, void *state, size_t size);
extern tsh_result tsh_set_rng_state(tsh_ctx *ctx, const void *state, size_t size);
extern tsh_module *tsh_add_layer_norm(tsh_module *parent, const char *name,
                                       const tsh_layer_norm_desc *desc);
extern tsh_module *tsh_add_rms_norm(tsh_module *parent, const char *name,
                                     const tsh_rms_norm_desc *desc);
extern tsh_module *tsh_add_dropout(tsh_module *parent, const char *name, double p);
extern tsh_tensor *tsh_add_param(tsh_module *module, const char *name, tsh_shape shape,
                                  const tsh_param_desc *desc);
extern tsh_tensor *tsh_forward_n(tsh_module *module, tsh_tensor **in, int n);
extern tsh_tensor *tsh_forward(tsh_module *module, tsh_tensor *x);
extern tsh_tensor *tsh_forward_residual(tsh_module *module, tsh_tensor **x, tsh_tensor *y);
typedef struct tsh_plan_rule {
    const char *path;
    tsh_style style;
    int segments;
    int64_t unit;
    int gather_output;
    const tsh_layout *input;
    const tsh_layout *output;
    int regather;
    const char *kind;
    const tsh_layout *const *inputs;
    int input_count;
    const tsh_segment *cut;
} tsh_plan_rule;
extern tsh_result tsh_parallelize(tsh_module *module, const tsh_plan_rule *rules, int count);
extern tsh_result tsh_plan_report(tsh_module *module, const tsh_plan_rule *rules, int count,
                                   FILE *file);
extern tsh_result tsh_summary(tsh_module *module, FILE *file);
extern tsh_module *tsh_add_linear(tsh_module *parent, const char *name,
                                   const tsh_linear_desc *desc);
extern tsh_module *tsh_add_classifier(tsh_module *parent, const char *name,
                                       const tsh_classifier_desc *desc);
extern tsh_module *tsh_add_embedding(tsh_module *parent, const char *name,
                                      const tsh_embedding_desc *desc);
typedef struct tsh_attention_layer_desc {
    int64_t dim;
    int64_t heads, kv_heads;
    int64_t head_dim;
    tsh_choice qkv_bias, out_bias;
    const tsh_rope_desc *rope;
    const tsh_rms_norm_desc *qk_norm;
    int norm_all_heads;
    tsh_attention_desc attention;
    int sinks;
    const char *q, *k, *v, *out;
    const char *fused;
    int by_group;
    int reversed;
    tsh_init weight_init, bias_init;
    tsh_dtype dtype;
} tsh_attention_layer_desc;
extern tsh_module *tsh_add_attention(tsh_module *parent, const char *name,
                                      const tsh_attention_layer_desc *desc);
extern tsh_result tsh_set_segments(tsh_module *module, tsh_tensor *segments);
typedef enum tsh_activation { TSH_GELU, TSH_GELU_TANH, TSH_RELU, TSH_SILU } tsh_activation;
typedef struct tsh_mlp_desc {
    int64_t dim, hidden;
    tsh_activation activation;
    int gated;
    tsh_choice bias;
    const char *gate, *up, *down;
    const char *fused;
    int reversed;
    tsh_init weight_init, bias_init;
    tsh_dtype dtype;
} tsh_mlp_desc;
extern tsh_module *tsh_add_mlp(tsh_module *parent, const char *name, const tsh_mlp_desc *desc);
extern tsh_cache *tsh_cache_new(tsh_module *module, int64_t batch, int64_t length,
                                 tsh_dtype dtype);
extern void tsh_cache_free(tsh_cache *cache);
extern tsh_result tsh_cache_counts(tsh_cache *cache, const int64_t *counts);
extern int64_t tsh_cache_length(const tsh_cache *cache);
extern tsh_result tsh_cache_truncate(tsh_cache *cache, int64_t length);
extern tsh_result tsh_set_argument(tsh_module *module, const char *name, int64_t value);
extern int64_t tsh_argument(const tsh_module *module, const char *name);
extern int64_t tsh_local_argument(const tsh_module *module, const char *name);
typedef struct tsh_policy_heads {
    const char *heads;
    const char *kv_heads;
    const char *hidden;
} tsh_policy_heads;
typedef struct tsh_policy_layer {
    const char *weight, *bias;
    int n_fused;
    tsh_style replace;
    int reversed;
    int ignore_checker;
    const tsh_policy_heads *heads;
    int kv;
} tsh_policy_layer;
typedef struct tsh_policy {
    const char *name;
    const char *blocks;
    const tsh_policy_layer *attn_qkv;
    const tsh_policy_layer *attn_out;
    const tsh_policy_layer *mlp_in;
    const tsh_policy_layer *mlp_out;
    const char *const *arguments;
    const struct tsh_policy *next;
} tsh_policy;
extern const tsh_policy *tsh_policy_find(const char *name);
extern tsh_result tsh_parallelize_policy(tsh_module *root, const tsh_policy *policy);
typedef struct tsh_conv_options {
    int64_t stride[2];
    int64_t padding[2];
    int64_t output_padding[2];
    int64_t dilation[2];
    int64_t groups;
} tsh_conv_options;
extern tsh_tensor *tsh_conv1d(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                               const tsh_conv_options *options);
extern tsh_tensor *tsh_conv2d(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                               const tsh_conv_options *options);
extern tsh_tensor *tsh_conv_transpose1d(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                         const tsh_conv_options *options);
extern tsh_tensor *tsh_conv_transpose2d(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                         const tsh_conv_options *options);
typedef struct tsh_pool_options {
    int64_t kernel[2];
    int64_t stride[2];
    int64_t padding[2];
    int64_t dilation[2];
    int ceil_mode;
    tsh_choice count_include_pad;
    int64_t divisor_override;
} tsh_pool_options;
extern tsh_tensor *tsh_max_pool1d(tsh_tensor *x, const tsh_pool_options *options);
extern tsh_tensor *tsh_max_pool2d(tsh_tensor *x, const tsh_pool_options *options);
extern tsh_tensor *tsh_avg_pool1d(tsh_tensor *x, const tsh_pool_options *options);
extern tsh_tensor *tsh_avg_pool2d(tsh_tensor *x, const tsh_pool_options *options);
extern tsh_tensor *tsh_adaptive_avg_pool1d(tsh_tensor *x, int64_t length);
extern tsh_tensor *tsh_adaptive_avg_pool2d(tsh_tensor *x, int64_t height, int64_t width);
typedef enum tsh_interpolation {
    TSH_NEAREST,
    TSH_BILINEAR
} tsh_interpolation;
typedef struct tsh_interpolate_options {
    int64_t size[2];
    double scale[2];
    tsh_interpolation mode;
    int align_corners;
} tsh_interpolate_options;
extern tsh_tensor *tsh_interpolate(tsh_tensor *x, const tsh_interpolate_options *options);
extern tsh_tensor *tsh_pixel_shuffle(tsh_tensor *x, int64_t factor);
typedef struct tsh_conv_desc {
    int64_t in, out;
    int64_t kernel[2];
    int64_t stride[2];
    int64_t padding[2];
    int64_t output_padding[2];
    int64_t dilation[2];
    int64_t groups;
    const tsh_layout *input;
    const tsh_layout *output;
    tsh_choice bias;
    tsh_style style;
    int64_t unit;
    int gather_output;
    tsh_init weight_init;
    tsh_init bias_init;
    tsh_dtype dtype;
} tsh_conv_desc;
extern tsh_module *tsh_add_conv1d(tsh_module *parent, const char *name, const tsh_conv_desc *desc);
extern tsh_module *tsh_add_conv2d(tsh_module *parent, const char *name, const tsh_conv_desc *desc);
extern tsh_module *tsh_add_conv_transpose1d(tsh_module *parent, const char *name,
                                             const tsh_conv_desc *desc);
extern tsh_module *tsh_add_conv_transpose2d(tsh_module *parent, const char *name,
                                             const tsh_conv_desc *desc);
typedef struct tsh_batch_norm_options {
    int training;
    double momentum;
    double eps;
    int over_dp;
} tsh_batch_norm_options;
extern tsh_tensor *tsh_batch_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                   tsh_tensor *running_mean, tsh_tensor *running_var,
                                   const tsh_batch_norm_options *options);
typedef struct tsh_batch_norm_desc {
    int64_t dim;
    double eps;
    double momentum;
    int cumulative;
    tsh_choice affine;
    tsh_choice running;
    int over_dp;
    tsh_dtype dtype;
} tsh_batch_norm_desc;
extern tsh_module *tsh_add_batch_norm(tsh_module *parent, const char *name,
                                       const tsh_batch_norm_desc *desc);
extern tsh_tensor *tsh_group_norm(tsh_tensor *x, int64_t groups, tsh_tensor *weight,
                                   tsh_tensor *bias, double eps);
extern tsh_tensor *tsh_instance_norm(tsh_tensor *x, tsh_tensor *weight, tsh_tensor *bias,
                                      double eps);
typedef struct tsh_group_norm_desc {
    int64_t groups, dim;
    double eps;
    tsh_choice affine;
    tsh_dtype dtype;
} tsh_group_norm_desc;
extern tsh_module *tsh_add_group_norm(tsh_module *parent, const char *name,
                                       const tsh_group_norm_desc *desc);
typedef struct tsh_instance_norm_desc {
    int64_t dim;
    double eps;
    tsh_choice affine;
    tsh_dtype dtype;
} tsh_instance_norm_desc;
extern tsh_module *tsh_add_instance_norm(tsh_module *parent, const char *name,
                                          const tsh_instance_norm_desc *desc);
typedef struct tsh_recurrent_desc {
    int64_t in, hidden;
    int layers;
    int bidirectional;
    int batch_first;
    tsh_choice bias;
    double dropout;
    tsh_module *owner;
    tsh_choice sharded;
    tsh_dtype dtype;
} tsh_recurrent_desc;
extern tsh_tensor *tsh_lstm(tsh_tensor *x, tsh_tensor *const *weights, int count, tsh_tensor *h0,
                             tsh_tensor *c0, const tsh_recurrent_desc *desc, tsh_tensor **h,
                             tsh_tensor **c);
extern tsh_tensor *tsh_gru(tsh_tensor *x, tsh_tensor *const *weights, int count, tsh_tensor *h0,
                            const tsh_recurrent_desc *desc, tsh_tensor **h);
extern tsh_module *tsh_add_lstm(tsh_module *parent, const char *name,
                                 const tsh_recurrent_desc *desc);
extern tsh_module *tsh_add_gru(tsh_module *parent, const char *name,
                                const tsh_recurrent_desc *desc);
extern tsh_tensor *tsh_lstm_forward(tsh_module *module, tsh_tensor *x, tsh_tensor *h0,
                                     tsh_tensor *c0, tsh_tensor **h, tsh_tensor **c);
extern tsh_tensor *tsh_gru_forward(tsh_module *module, tsh_tensor *x, tsh_tensor *h0,
                                    tsh_tensor **h);
typedef enum tsh_schedule_kind {
    TSH_CONSTANT,
    TSH_LINEAR,
    TSH_COSINE,
    TSH_STEP,
    TSH_EXPONENTIAL,
    TSH_ONE_CYCLE,
    TSH_WSD,
    TSH_LAMBDA
} tsh_schedule_kind;
typedef struct tsh_schedule {
    tsh_schedule_kind kind;
    double lr, lr_min;
    int64_t warmup, total;
    int64_t period;
    double gamma;
    double pct_start, div_factor, final_div_factor;
    int64_t decay;
    tsh_schedule_kind shape;
    double (*factor)(int64_t t, void *user);
    void *user;
} tsh_schedule;
extern double tsh_schedule_lr(const tsh_schedule *schedule, int64_t step);
typedef struct tsh_plateau {
    double lr;
    double factor;
    int64_t patience;
    double threshold;
    int absolute;
    int largest;
    int64_t cooldown;
    double lr_min;
    double eps;
    double best;
    int64_t bad, cooling, calls;
} tsh_plateau;
extern double tsh_plateau_step(tsh_plateau *plateau, double metric);
typedef enum tsh_optim_kind {
    TSH_SGD,
    TSH_ADAM,
    TSH_ADAMW,
    TSH_LION,
    TSH_RMSPROP,
    TSH_ADAGRAD,
    TSH_ADAMAX,
    TSH_NADAM,
    TSH_RADAM,
    TSH_ADAFACTOR,
    TSH_MUON,
    TSH_CUSTOM
} tsh_optim_kind;
typedef enum tsh_adjust_lr {
    TSH_ADJUST_ORIGINAL,
    TSH_ADJUST_MATCH_RMS_ADAMW,
    TSH_ADJUST_NONE
} tsh_adjust_lr;
enum { TSH_MAX_MOMENTS = 3 };
typedef struct tsh_update {
    const char *path;
    int64_t n;
    tsh_real *x;
    const tsh_real *grad;
    tsh_real *moment[TSH_MAX_MOMENTS];
    tsh_shape shape;
    double lr, weight_decay;
    int64_t step;
} tsh_update;
typedef struct tsh_custom_optim {
    const char *name;
    int moments;
    int whole;
    void (*update)(const tsh_update *update, void *user);
    void *user;
} tsh_custom_optim;
typedef struct tsh_optim_desc {
    tsh_optim_kind kind;
    double lr;
    double momentum;
    int nesterov;
    double beta1, beta2, eps;
    double weight_decay;
    double clip_norm;
    int zero;
    tsh_dtype grad_dtype, moments_dtype;
    int round_weights;
    const tsh_schedule *schedule;
    double alpha;
    int centered;
    double lr_decay;
    double momentum_decay;
    int decoupled;
    double beta2_decay;
    double eps2, d;
    double ns_coefficients[3];
    int ns_steps;
    tsh_adjust_lr adjust_lr_fn;
    tsh_custom_optim custom;
} tsh_optim_desc;
extern tsh_optim *tsh_optim_new(tsh_module *module, const tsh_optim_desc *desc);
extern void tsh_optim_free(tsh_optim *optim);
extern tsh_result tsh_optim_group(tsh_optim *optim, const char *pattern, double lr_scale,
                                   double weight_decay);
extern tsh_result tsh_optim_group_with(tsh_optim *optim, const char *pattern,
                                        const tsh_optim_desc *desc);
extern void tsh_optim_set_lr(tsh_optim *optim, double lr);
extern tsh_result tsh_optim_step(tsh_optim *optim);
typedef struct tsh_optim_info {
    int64_t steps, skipped;
    double norm;
    double lr;
} tsh_optim_info;
extern tsh_optim_info tsh_optim_state(const tsh_optim *optim);
extern tsh_result tsh_clip_grad_norm(tsh_module *module, double max_norm, double *norm);
extern tsh_result tsh_freeze(tsh_module *module, const char *pattern);
extern tsh_result tsh_unfreeze(tsh_module *module, const char *pattern);
typedef struct tsh_lora_part {
    const char *name;
    int64_t length;
} tsh_lora_part;
typedef struct tsh_lora_desc {
    int rank;
    double alpha;
    double dropout;
    int rslora;
    const char *name;
    tsh_dtype dtype;
    const tsh_lora_part *parts;
    int part_count;
} tsh_lora_desc;
extern tsh_result tsh_lora(tsh_module *module, const char *pattern, const tsh_lora_desc *desc);
extern tsh_result tsh_lora_use(tsh_module *module, const char *name);
extern tsh_result tsh_lora_merge(tsh_module *module);
extern tsh_result tsh_lora_unmerge(tsh_module *module);
extern tsh_result tsh_lora_free(tsh_module *module, const char *name);
typedef struct tsh_ema tsh_ema;
extern tsh_ema *tsh_ema_new(tsh_module *module, double decay);
extern void tsh_ema_free(tsh_ema *ema);
extern tsh_result tsh_ema_update(tsh_ema *ema);
extern tsh_result tsh_ema_swap(tsh_ema *ema);
extern int64_t tsh_ema_updates(const tsh_ema *ema);
typedef struct tsh_outer_desc {
    int64_t every;
    double lr;
    double momentum;
    tsh_dtype wire;
    int fragments;
    int64_t delay;
    double mix;
} tsh_outer_desc;
extern tsh_outer *tsh_outer_new(tsh_module *module, tsh_optim *optim, const tsh_outer_desc *desc);
extern tsh_result tsh_outer_step(tsh_outer *outer);
typedef struct tsh_outer_info {
    int64_t steps;
    int64_t exchanges;
} tsh_outer_info;
extern tsh_outer_info tsh_outer_state(const tsh_outer *outer);
extern void tsh_outer_free(tsh_outer *outer);
extern tsh_result tsh_quantize(tsh_module *module, const char *pattern, tsh_dtype dtype);
typedef enum tsh_pipeline_schedule {
    TSH_PIPELINE_1F1B,
    TSH_PIPELINE_GPIPE
} tsh_pipeline_schedule;
typedef struct tsh_pipeline_desc {
    int micro_batches;
    const int *counts;
    tsh_pipeline_schedule schedule;
    tsh_tensor *(*input)(tsh_ctx *ctx, int micro_batch, void *user);
    tsh_tensor *(*loss)(tsh_ctx *ctx, tsh_tensor *output, int micro_batch, void *user);
    double (*weight)(tsh_ctx *ctx, int micro_batch, void *user);
    void *user;
} tsh_pipeline_desc;
extern tsh_pipeline *tsh_pipeline_new(tsh_module *container, const tsh_pipeline_desc *desc);
extern tsh_result tsh_pipeline_train(tsh_pipeline *pipeline, double *loss);
extern tsh_result tsh_pipeline_evaluate(tsh_pipeline *pipeline, int micro_batches, double *loss);
extern tsh_result tsh_save(tsh_module *module, const char *path, const tsh_optim *optim);
typedef struct tsh_rename {
    const char *from, *to;
} tsh_rename;
typedef struct tsh_hasher {
    size_t size;
    void (*begin)(void *state);
    void (*add)(void *state, const void *bytes, size_t count);
    void (*end)(void *state, unsigned char hash[32]);
} tsh_hasher;
typedef struct tsh_file_desc {
    const char *prefix;
    tsh_dtype dtype;
    int strict_names;
    int strict_dtype;
    const tsh_rename *rename;
    const char *const *ignore;
    int broadcast;
    const char *cache;
    const tsh_hasher *hasher;
    uint64_t stamp;
    int64_t (*read_at)(int64_t at, void *to, int64_t bytes, void *user);
    void *user;
    tsh_ema *ema;
    const char *adapter;
    int64_t shard_bytes;
} tsh_file_desc;
extern tsh_result tsh_save_with(tsh_module *module, const char *path, const tsh_optim *optim,
                                 const tsh_file_desc *desc);
extern tsh_result tsh_load(tsh_module *module, const char *path, tsh_optim *optim);
extern tsh_result tsh_load_with(tsh_module *module, const char *path, tsh_optim *optim,
                                 const tsh_file_desc *desc);
extern FILE *tsh_file_open(const char *path, int64_t max, tsh_error *error);
typedef struct tsh_writer {
    tsh_error error;
    int64_t size;
    FILE *file;
    int rows, lock;
    char name[208], target[4096], temporary[4096 + 32];
} tsh_writer;
extern tsh_result tsh_writer_open(tsh_writer *writer, const char *path, int rows);
extern tsh_result tsh_writer_add(tsh_writer *writer, const void *data, size_t bytes);
extern tsh_result tsh_writer_sync(tsh_writer *writer);
extern tsh_result tsh_writer_close(tsh_writer *writer, int keep);
typedef tsh_tensor *(*tsh_gradcheck_fn)(tsh_ctx *ctx, tsh_tensor **in, int n, void *user);
extern double tsh_gradcheck(tsh_ctx *ctx, tsh_gradcheck_fn fn, tsh_tensor **in, int n, void *user,
                             double eps, int64_t samples);
extern int tsh_check_replicas(tsh_module *module);
extern uint64_t tsh_hash(tsh_ctx *ctx, tsh_tensor *t);
typedef struct tsh_trace_desc {
    const char *path;
    int (*print)(const char *text, size_t size, void *user);
    int64_t (*now)(void *user);
    void *user;
    int64_t limit;
} tsh_trace_desc;
extern tsh_result tsh_trace_begin(tsh_ctx *ctx, const tsh_trace_desc *desc);
extern tsh_result tsh_trace_end(tsh_ctx *ctx);
extern tsh_result tsh_profile(tsh_ctx *ctx, int on);
typedef struct tsh_threads_world tsh_threads_world;
extern int tsh_threads_run(int nranks, const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                            void *user);
extern int tsh_threads_run_built(int version, size_t real, size_t size, int nranks,
                                  const tsh_desc *desc, int (*fn)(tsh_ctx *ctx, void *user),
                                  void *user);
typedef struct tsh_threads_desc {
    int ranks;
    int bind;
} tsh_threads_desc;
extern int tsh_threads_run_with(const tsh_threads_desc *threads, const tsh_desc *desc,
                                 int (*fn)(tsh_ctx *ctx, void *user), void *user);
extern int tsh_threads_run_with_built(int version, size_t real, size_t size,
                                       const tsh_threads_desc *threads, const tsh_desc *desc,
                                       int (*fn)(tsh_ctx *ctx, void *user), void *user);
extern int tsh_threads_cores(void);
extern tsh_result tsh_threads_world_new(int nranks, tsh_threads_world **out);
extern tsh_result tsh_threads_comm(tsh_threads_world *world, int rank, tsh_comm *out);
extern void tsh_threads_world_free(tsh_threads_world *world);
