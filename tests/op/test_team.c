/* The threads of one rank: every op gives the same bits, forward and backward, whether one thread
 * works or several share. Shapes are large enough to be shared, and do not divide evenly. */
#define TSHARD_IMPLEMENTATION
#if defined(_OPENMP)
#include <omp.h>
#endif
#include "../../tshard.h"
#include "../support/unit.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

enum { INPUTS = 4, HASHES = 64 };

typedef struct hashes {
    uint64_t hash[HASHES];
    int count;
} hashes;

/* ------------------------------------------------------------------------ ops */

typedef struct op_case {
    const char *name;
    tsh_tensor *(*run)(tsh_tensor *const *in);
    int64_t dim[INPUTS][4]; /* of the inputs that get gradients, up to the first 0 */
} op_case;

/* The input as a positive number. */
static tsh_tensor *above(tsh_tensor *x) {
    return tsh_add_scalar(tsh_mul(x, x), 0.1);
}

static tsh_tensor *run_add(tsh_tensor *const *in) {
    return tsh_add(in[0], in[1]);
}
static tsh_tensor *run_mul(tsh_tensor *const *in) {
    return tsh_mul(in[0], in[1]);
}
static tsh_tensor *run_turned(tsh_tensor *const *in) {
    return tsh_div(tsh_transpose(in[0], 0, 1), above(in[1]));
}
static tsh_tensor *run_where(tsh_tensor *const *in) {
    return tsh_where(tsh_lt(in[0], in[1]), in[0], in[1]);
}
static tsh_tensor *run_unary(tsh_tensor *const *in) {
    tsh_tensor *x = tsh_add(tsh_exp(tsh_scale(in[0], 0.1)), tsh_log(above(in[0])));
    x = tsh_add(x, tsh_add(tsh_tanh(in[0]), tsh_sigmoid(in[0])));
    x = tsh_add(x, tsh_add(tsh_gelu(in[0]), tsh_gelu_tanh(in[0])));
    return tsh_add(x, tsh_add(tsh_silu(in[0]), tsh_relu(in[0])));
}
static tsh_tensor *run_sums(tsh_tensor *const *in) {
    return tsh_add(tsh_sum(in[0], 1, 1), tsh_mean(in[0], 0, 1));
}
static tsh_tensor *run_max(tsh_tensor *const *in) {
    return tsh_add(tsh_max(in[0], 1, 1), tsh_max(in[0], 0, 1));
}
static tsh_tensor *run_softmax(tsh_tensor *const *in) {
    return tsh_add(tsh_softmax(in[0], 1), tsh_log_softmax(in[0], 0));
}
static tsh_tensor *run_norms(tsh_tensor *const *in) {
    return tsh_add(tsh_layer_norm(in[0], in[1], in[2], 0), tsh_rms_norm(in[0], in[1], 0));
}
static tsh_tensor *run_matmul(tsh_tensor *const *in) {
    return tsh_matmul(in[0], in[1]);
}
static tsh_tensor *run_linear(tsh_tensor *const *in) {
    return tsh_linear(in[0], in[1], in[2]);
}
static tsh_tensor *run_rope(tsh_tensor *const *in) {
    return tsh_rope(in[0], NULL);
}
static tsh_tensor *run_attention(tsh_tensor *const *in) {
    const tsh_attention_desc desc = {.causal = 1, .dropout = 0.1};
    return tsh_attention(in[0], in[1], in[2], &desc);
}
/* q, k and v are views of one tensor: side by side, the same, and overlapping. */
static tsh_tensor *run_attention_views(tsh_tensor *const *in) {
    tsh_tensor *qkv[3] = {NULL, NULL, NULL}, *x = in[0], *y;
    int i;
    tsh_split(x, -1, 3, qkv);
    for (i = 0; i < 3; i++)
        qkv[i] = tsh_transpose(tsh_reshape(qkv[i], tsh_shape4(2, 131, 6, 32)), 1, 2);
    y = tsh_add(tsh_attention(qkv[0], qkv[1], qkv[2], NULL),
                tsh_attention(qkv[0], qkv[0], qkv[0], NULL));
    x = qkv[0];
    return tsh_add(y, tsh_attention(x, tsh_slice(x, 1, 2, 2), tsh_slice(x, 1, 3, 2), NULL));
}
static tsh_tensor *run_dropout(tsh_tensor *const *in) {
    return tsh_dropout(in[0], 0.3, NULL);
}
static tsh_tensor *run_views(tsh_tensor *const *in) {
    return tsh_concat(in, 2, 0);
}

/* Integers 0, 7, 14, ... below `most`. */
static tsh_tensor *integers(tsh_ctx *ctx, int64_t n, int64_t most) {
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_I64, tsh_shape1(n), tsh_replicated());
    int64_t i, *values = (int64_t *)tsh_data(ctx, t);
    for (i = 0; i < n; i++) values[i] = i * 7 % most;
    return t;
}

static tsh_tensor *run_embedding(tsh_tensor *const *in) {
    return tsh_embedding(integers(tsh_ctx_of(in[0]), 301, tsh_size(in[0], 0)), in[0], NULL);
}
static tsh_tensor *run_loss(tsh_tensor *const *in) {
    const tsh_cross_entropy_desc desc = {.label_smoothing = 0.1, .reduction = TSH_REDUCE_NONE};
    tsh_tensor *target = integers(tsh_ctx_of(in[0]), tsh_size(in[0], 0), tsh_size(in[0], 1));
    return tsh_add(tsh_cross_entropy(in[0], target, &desc),
                   tsh_cross_entropy(in[0], tsh_softmax(tsh_detach(in[0]), 1), &desc));
}

static const op_case cases[] = {
    {"add", run_add, {{301, 1003}, {301, 1003}}},
    {"add, broadcast", run_add, {{301, 1003}, {1003}}},
    {"mul, broadcast", run_mul, {{301, 1, 503}, {7, 503}}},
    {"div, turned", run_turned, {{301, 1003}, {1003, 301}}},
    {"where", run_where, {{301, 1003}, {301, 1003}}},
    {"unary", run_unary, {{301, 1003}}},
    {"sum, mean", run_sums, {{301, 1003}}},
    {"max", run_max, {{301, 1003}}},
    {"softmax", run_softmax, {{301, 1003}}},
    {"norms", run_norms, {{301, 203}, {203}, {203}}},
    {"norms of long rows", run_norms, {{3, 70001}, {70001}, {70001}}},
    {"norms of few columns", run_norms, {{5003, 16}, {16}, {16}}}, /* fewer than threads share */
    {"matmul", run_matmul, {{301, 203}, {203, 407}}},
    {"matmul, one row", run_matmul, {{1, 2003}, {2003, 4001}}},
    {"matmul, few rows", run_matmul, {{5, 803}, {803, 2001}}},
    {"matmul, batched", run_matmul, {{3, 131, 203}, {203, 307}}},
    {"linear", run_linear, {{5, 61, 203}, {407, 203}, {407}}},
    {"rope", run_rope, {{2, 3, 301, 64}}},
    {"attention", run_attention, {{2, 6, 131, 32}, {2, 6, 131, 32}, {2, 6, 131, 32}}},
    {"attention, shared heads", run_attention, {{1, 6, 131, 80}, {1, 3, 131, 80}, {1, 3, 131, 80}}},
    {"attention, views of one", run_attention_views, {{2, 131, 576}}},
    {"dropout", run_dropout, {{301, 1003}}},
    {"concat", run_views, {{301, 1003}, {203, 1003}}},
    {"embedding", run_embedding, {{101, 2003}}},
    {"cross-entropy", run_loss, {{301, 1003}}},
};

static tsh_ctx *open_with(int threads) {
    tsh_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.seed = 5;
    desc.threads = threads;
    return unit_open(&desc);
}

static void add_hash(hashes *h, tsh_tensor *t) {
    assert_non_null(t);
    h->hash[h->count++] = tsh_hash(tsh_ctx_of(t), t);
}

/* Hashes of the op's value, and of every input's gradient. */
static hashes run_case(const op_case *c, int threads) {
    tsh_ctx *ctx = open_with(threads);
    tsh_tensor *in[INPUTS] = {NULL, NULL, NULL, NULL}, *out;
    hashes h = {{0}, 0};
    int n, d;
    for (n = 0; n < INPUTS && c->dim[n][0]; n++) {
        tsh_shape shape = tsh_shape0();
        for (d = 0; d < 4 && c->dim[n][d]; d++) shape.dim[shape.ndim++] = c->dim[n][d];
        in[n] = tsh_keep(tsh_randn(ctx, shape));
        (void)tsh_requires_grad(in[n], 1);
    }
    out = c->run(in);
    if (!tsh_ok(ctx)) fail_msg("%s: %s", c->name, tsh_last_error(ctx)->message);
    add_hash(&h, tsh_detach(out));
    (void)tsh_backward(ctx, tsh_mean(tsh_mul(out, tsh_randn(ctx, tsh_shape_of(out))), TSH_ALL, 0));
    while (n-- > 0) {
        if (!tsh_grad(in[n])) fail_msg("%s: no gradient %d", c->name, n);
        add_hash(&h, tsh_grad(in[n]));
    }
    unit_close(ctx);
    return h;
}

/* Several threads are one without OpenMP: there is nothing to compare. */
static void need_openmp(void) {
#if !defined(_OPENMP)
    print_message("skip: compiled without OpenMP\n");
    skip();
#endif
}

static void expect_same(const char *what, int threads, const hashes *one, const hashes *many) {
    int i;
    assert_int_equal(one->count, many->count);
    for (i = 0; i < one->count; i++)
        if (one->hash[i] != many->hash[i])
            fail_msg("%s: on %d threads result %d has other bits", what, threads, i);
}

static void ops_give_the_same_bits(void **state) {
    static const int threads[] = {2, 3, 5};
    int c, t;
    (void)state;
    need_openmp();
    for (c = 0; c < COUNT(cases); c++) {
        hashes one = run_case(&cases[c], 1);
        for (t = 0; t < COUNT(threads); t++) {
            hashes many = run_case(&cases[c], threads[t]);
            expect_same(cases[c].name, threads[t], &one, &many);
        }
    }
}

/* ----------------------------------------------------------------- optimisers */

static void add_param(const char *path, tsh_tensor *param, void *user) {
    (void)path;
    add_hash((hashes *)user, param);
}

static hashes train(tsh_optim_kind kind, int sparse, int threads) {
    tsh_ctx *ctx = open_with(threads);
    tsh_module *root = tsh_root(ctx);
    const tsh_linear_desc wide = {.in = 401, .out = 503};
    const tsh_optim_desc desc = {.kind = kind, .lr = 0.01, .momentum = 0.9, .clip_norm = 0.5};
    tsh_embedding_desc table = {.count = 307, .dim = 401};
    tsh_module *rows, *linear;
    tsh_optim *optim;
    hashes h = {{0}, 0};
    int step;
    table.lookup.sparse = sparse;
    rows = tsh_add_embedding(root, "rows", &table);
    linear = tsh_add_linear(root, "linear", &wide);
    optim = tsh_optim_new(root, &desc);
    for (step = 0; step < 3; step++) {
        tsh_tensor *x = tsh_forward(rows, integers(ctx, 211, 307));
        tsh_tensor *y = tsh_forward(linear, tsh_tanh(x));
        (void)tsh_backward(ctx, tsh_mean(tsh_mul(y, y), TSH_ALL, 0));
        (void)tsh_optim_step(optim);
        tsh_zero_grads(root);
        (void)tsh_step_end(ctx);
    }
    tsh_each_param(root, add_param, &h);
    unit_close(ctx);
    return h;
}

static void optimisers_give_the_same_bits(void **state) {
    static const tsh_optim_kind kinds[] = {TSH_SGD, TSH_ADAM, TSH_ADAMW};
    int k, sparse, threads;
    (void)state;
    need_openmp();
    for (k = 0; k < COUNT(kinds); k++)
        for (sparse = 0; sparse < 2; sparse++) {
            hashes one = train(kinds[k], sparse, 1);
            for (threads = 2; threads <= 3; threads++) {
                hashes many = train(kinds[k], sparse, threads);
                expect_same("training", threads, &one, &many);
            }
        }
}

/* -------------------------------------------------------------------- the team */

enum { UNITS = 1003 };

typedef struct tally {
    int pieces, times[UNITS], broken;
    int team; /* threads of the parallel region that ran the first piece; 0: there is no OpenMP */
} tally;

static void count_units(void *job, int piece, int64_t from, int64_t to) {
    tally *t = (tally *)job;
    if (piece < 0 || piece >= t->pieces || from > to || from % 16) t->broken = 1;
    for (; from < to; from++) t->times[from]++;
#if defined(_OPENMP)
    if (piece == 0) t->team = omp_get_num_threads();
#endif
}

static void every_unit_is_done_once(void **state) {
    static tally t;
    tsh_ctx *ctx = open_with(4);
    int pieces, i;
    (void)state;
    for (pieces = 1; pieces <= 9; pieces++) {
        memset(&t, 0, sizeof t);
        t.pieces = pieces;
        tshi_team_run(ctx, pieces, UNITS, 16, count_units, &t);
        assert_int_equal(t.broken, 0);
        for (i = 0; i < UNITS; i++) assert_int_equal(t.times[i], 1);
#if defined(_OPENMP)
        assert_int_equal(t.team, pieces == 1 ? 1 : 4); /* a smaller one would end the others */
#endif
    }
    unit_close(ctx);
}

static void small_work_stays_on_one_thread(void **state) {
    tsh_ctx *ctx = open_with(4);
    (void)state;
    assert_int_equal(tshi_team_parts(ctx, 199, 100), 1);
    assert_int_equal(tshi_team_parts(ctx, 0, 100), 1);
#if defined(_OPENMP)
    assert_int_equal(tshi_team_parts(ctx, 200, 100), 2);
    assert_int_equal(tshi_team_parts(ctx, 100000, 100), 4);
#else
    assert_int_equal(tshi_team_parts(ctx, 100000, 100), 1);
#endif
    unit_close(ctx);
}

/* ------------------------------------------------------------- a user's product */

enum { CALLS = 16 };

typedef struct product_call {
    int64_t m, n, k;
    int threads;
} product_call;

typedef struct product_log {
    product_call call[CALLS];
    int calls;
} product_log;

static void plain_gemm(int64_t m, int64_t n, int64_t k, tsh_real alpha,
                       const tsh_real *a, int64_t rsa, int64_t csa, const tsh_real *b, int64_t rsb,
                       int64_t csb, tsh_real beta, tsh_real *c, int64_t rsc, int64_t csc,
                       int threads, void *user) {
    product_log *log = (product_log *)user;
    const int at = __atomic_fetch_add(&log->calls, 1, __ATOMIC_RELAXED);
    int64_t i, j, p;
    if (at < CALLS) {
        const product_call call = {m, n, k, threads};
        log->call[at] = call;
    }
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            tsh_real sum = 0, *to = c + i * rsc + j * csc;
            for (p = 0; p < k; p++) sum += a[i * rsa + p * csa] * b[p * rsb + j * csb];
            *to = beta == 0 ? alpha * sum : alpha * sum + beta * *to;
        }
}

/* The values of a (m, 80) times b (80, n), on so many threads, and the calls that it took. */
static void multiply(int threads, int64_t m, int64_t n, tsh_real *values, product_log *log) {
    tsh_desc desc;
    tsh_ctx *ctx;
    tsh_tensor *c;
    memset(&desc, 0, sizeof desc);
    memset(log, 0, sizeof *log);
    desc.seed = 5;
    desc.threads = threads;
    desc.gemm.multiply = plain_gemm;
    desc.gemm.user = log;
    ctx = unit_open(&desc);
    c = tsh_matmul(tsh_randn(ctx, tsh_shape2(m, 80)), tsh_randn(ctx, tsh_shape2(80, n)));
    assert_int_equal(tsh_read(ctx, c, TSH_LOCAL, values, (size_t)(m * n) * sizeof *values), TSH_OK);
    unit_close(ctx);
}

static void a_product_is_cut_along_its_longer_side(void **state) {
    enum { LONG = 301, SHORT = 203 };
    static tsh_real one[LONG * SHORT], many[LONG * SHORT];
    product_log log;
    int rows, i;
    (void)state;
    for (rows = 0; rows < 2; rows++) {
        const int64_t m = rows ? LONG : SHORT, n = rows ? SHORT : LONG;
        int64_t sum = 0;
        multiply(1, m, n, one, &log);
        assert_int_equal(log.calls, 1);
        multiply(3, m, n, many, &log);
        assert_memory_equal(one, many, sizeof one);
#if defined(_OPENMP)
        assert_int_equal(log.calls, 3);
#else
        assert_int_equal(log.calls, 1);
#endif
        for (i = 0; i < log.calls; i++) {
            assert_int_equal(log.call[i].k, 80);
            assert_int_equal(log.call[i].threads, log.calls == 1 ? 3 : 1);
            assert_int_equal(rows ? log.call[i].n : log.call[i].m, SHORT);
            sum += rows ? log.call[i].m : log.call[i].n;
        }
        assert_int_equal(sum, LONG);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_unit_is_done_once),
        cmocka_unit_test(small_work_stays_on_one_thread),
        cmocka_unit_test(ops_give_the_same_bits),
        cmocka_unit_test(optimisers_give_the_same_bits),
        cmocka_unit_test(a_product_is_cut_along_its_longer_side),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
