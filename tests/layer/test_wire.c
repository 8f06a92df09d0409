/* Activations sent in another dtype (tsh_desc.wire): what each change of layout gives, that
 * replicated values stay equal on all ranks, fewer bytes, gradients of layers, and mistakes. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

/* By how much an encoded value may be off, as a part of the largest one of its block: integers up
 * to 256 are exact in bf16; 4 bits have no +8, only -8. */
static const struct wire {
    tsh_dtype dtype;
    double off;
} wires[] = {{TSH_BF16, 0}, {TSH_Q8_0, 0.505 / 127}, {TSH_Q4_0, 1.01 / 8}};

/* By this rank over tp, so far. */
static int64_t bytes_sent(tsh_ctx *ctx) {
    int64_t bytes = 0;
    for (int kind = 0; kind < TSH_COLL_KINDS; kind++)
        bytes += (int64_t)tsh_tp(ctx)->stats.bytes[kind];
    return bytes;
}

/* Whether these bytes are the same on every rank of tp. */
static int same_bytes(tsh_ctx *ctx, const void *data, size_t bytes) {
    const unsigned char *at = (const unsigned char *)data;
    int64_t ends[2] = {0, 0}; /* a hash, and the same negative */
    for (size_t i = 0; i < bytes; i++) ends[0] = (ends[0] * 31 + at[i]) % 1000000007;
    ends[1] = -ends[0];
    return tsh_allreduce(tsh_tp(ctx), ends, 2, TSH_I64, TSH_MAX) == TSH_OK && ends[0] == -ends[1];
}

/* Whether this rank's values of t are those of every rank of tp, bit by bit. */
static int same_everywhere(tsh_ctx *ctx, tsh_tensor *t) {
    const size_t bytes = (size_t)tsh_local_numel(t) * tsh_dtype_size(tsh_dtype_of(t));
    void *values = malloc(bytes + 1);
    const int read = tsh_read(ctx, t, TSH_LOCAL, values, bytes) == TSH_OK;
    const int same = same_bytes(ctx, values, read ? bytes : 0);
    free(values);
    return read && same;
}

/* ------------------------------------------------------------------------ changes of layout */

/* Rows and shards do not end where blocks of 32 end. The layouts are those of specs. */
static const struct move {
    const char *from, *to;
} moves[] = {{"161,130 P", "161,130 R"},
             {"161,130 P", "161,130 S(0)"},
             {"161,130 P", "161,130 S(1)"},
             {"161,130 P", "161,130 S(1, 2 segments, unit 5)"},
             {"161,130 S(0)", "161,130 R"},
             {"161,130 S(1)", "161,130 R"},
             {"161,130 S(1, 2 segments, unit 5)", "161,130 R"},
             {"161,130 S(0)", "161,130 S(1)"},
             {"161,130 S(0)", "161,130 S(0, unit 23)"}};

/* y has the values of x, but for what its blocks have lost. */
static int is_near(tsh_ctx *ctx, const char *name, tsh_tensor *x, tsh_tensor *y, double most,
                   int exact) {
    double *want = ranks_values(ctx, x), *got = ranks_values(ctx, y), worst = 0;
    CHECK(want && got, "%s: %s", name, tsh_last_error(ctx)->message);
    for (int64_t e = 0; e < tsh_numel(x); e++) worst = fmax(worst, fabs(got[e] - want[e]));
    free(want);
    free(got);
    CHECK(worst <= most, "%s: off by %g, not %g", name, worst, most);
    CHECK((worst > 0) == !exact, "%s: off by %g", name, worst);
    return 0;
}

static int move_one(tsh_ctx *ctx, const struct move *m, const struct wire *wire) {
    const spec from = spec_parse(m->from, 1), to = spec_parse(m->to, 1);
    const int ranks = tsh_tp(ctx)->size, sums = from.layout.kind == TSH_PARTIAL;
    tsh_tensor *x = spec_tensor(ctx, &from, 11), *y;
    /* the largest terms of the sums that spec_tensor makes, then the sums, are encoded */
    const double most = wire->off * 3 * (sums ? 2 * ranks : 1) * (1 + 1e-3);
    const double bits = wire->dtype == TSH_BF16 ? 16 : wire->dtype == TSH_Q8_0 ? 8.5 : 4.5;
    int64_t before = bytes_sent(ctx), sent[2]; /* by all ranks, as they are and encoded */
    CHECK(tsh_redistribute(x, to.layout), "%s to %s", m->from, m->to); /* an owned tensor */
    sent[0] = bytes_sent(ctx) - before;
    if (is_near(ctx, m->from, x, tsh_redistribute(x, to.layout), 0, 1)) return 1;
    y = tsh_scale(x, 1);
    before = bytes_sent(ctx);
    y = tsh_redistribute(y, to.layout);
    sent[1] = bytes_sent(ctx) - before;
    CHECK(tsh_allreduce(tsh_tp(ctx), sent, 2, TSH_I64, TSH_SUM) == TSH_OK, "the sums");
    if (is_near(ctx, m->from, x, y, most, wire->dtype == TSH_BF16)) return 1;
    if (to.layout.kind == TSH_REPLICATED) CHECK(same_everywhere(ctx, y), "%s", m->from);
    CHECK((double)sent[1] <= 1.15 * bits / 8 / (double)sizeof(tsh_real) * (double)sent[0],
          "%s to %s: %d bytes, %d as they are", m->from, m->to, (int)sent[1], (int)sent[0]);
    tsh_tensor_free(x);
    (void)tsh_step_end(ctx);
    return 0;
}

/* What is not finite is not hidden, and values of any size keep their bits. */
static int unusual_values(tsh_ctx *ctx, const struct wire *wire) {
    static const double factors[] = {1e-30, 1e-9, 1e30, (double)INFINITY, (double)NAN};
    const spec rows = spec_parse("161,130 S(0)", 1);
    for (int i = 0; i < COUNT(factors); i++) {
        tsh_tensor *x = spec_tensor(ctx, &rows, 14), *y;
        y = tsh_full_tensor(tsh_scale(x, factors[i]));
        if (factors[i] > 0 && factors[i] < 1e31) {
            y = tsh_scale(y, 1 / factors[i]);
            if (is_near(ctx, "scaled", x, y, 3 * wire->off + 1e-2, 0)) return 1;
        } else {
            double *values = ranks_values(ctx, y);
            CHECK(values, "%s", tsh_last_error(ctx)->message);
            for (int64_t e = 0; e < tsh_numel(y); e++)
                CHECK(!(fabs(values[e]) <= 1e300), "a finite value");
            free(values);
        }
        tsh_tensor_free(x);
        (void)tsh_step_end(ctx);
    }
    return 0;
}

static int moves_all(tsh_ctx *ctx, void *user) {
    const struct wire *wire = (const struct wire *)user;
    const spec few = spec_parse("120,130 S(0)", 1);
    const spec integers = spec_parse("%7 161,130 S(0)", 1);
    tsh_tensor *x;
    for (int i = 0; i < COUNT(moves); i++)
        if (move_one(ctx, &moves[i], wire)) return 1;
    if (unusual_values(ctx, wire)) return 1;
    x = spec_tensor(ctx, &few, 12);
    if (is_near(ctx, "few", x, tsh_full_tensor(tsh_scale(x, 1)), 0, 1)) return 1;
    x = spec_tensor(ctx, &integers, 13);
    if (is_near(ctx, "integers", x, tsh_full_tensor(tsh_clone(x)), 0, 1)) return 1;
    CHECK_OK();
    return 0;
}

static void layouts_change_in_the_wire_s_dtype(void **state) {
    (void)state;
    for (int w = 0; w < COUNT(wires); w++) {
        const tsh_desc desc = {.wire = wires[w].dtype};
        for (int i = 1; i < COUNT(ranks_degrees); i++) /* not 1 */
            ranks_run_with(ranks_degrees[i], &desc, moves_all, (void *)(uintptr_t)&wires[w]);
    }
}

/* ------------------------------------------------------------------------ layers */

enum { ROWS = 300, WIDTH = 64, INNER = 96, CHANNELS = 8, LONG = 2100, MOST = 20000 };

/* What a rank has of a net: its loss, and all gradients one after the other. */
typedef struct result {
    double loss;
    int64_t count;
    double grads[MOST];
} result;

typedef struct training {
    result *one;        /* what one rank has */
    double least, most; /* how far the gradients of other ranks are from that */
    int sequence;       /* 1: activations are shards of the sequence */
} training;

static void keep_grad(const char *path, tsh_tensor *param, void *user) {
    result *r = (result *)user;
    tsh_ctx *ctx = tsh_ctx_of(param);
    double *values = ranks_values(ctx, tsh_grad(param));
    (void)path;
    for (int64_t e = 0; e < tsh_numel(param) && values && r->count < MOST; e++)
        r->grads[r->count++] = values[e];
    free(values);
}

/* Returns 0 if a rank has a result as far from that of one rank as it may be, and the bits of the
 * other ranks. */
static int is_off(tsh_ctx *ctx, const training *t, const result *r) {
    double off = 0, length = 0;
    CHECK(r->count == t->one->count && r->count > 0 && r->count < MOST, "the gradients");
    for (int64_t e = 0; e < r->count; e++) {
        const double rest = r->grads[e] - t->one->grads[e];
        off += rest * rest;
        length += t->one->grads[e] * t->one->grads[e];
    }
    off = sqrt(off / length);
    CHECK(off >= t->least && off <= t->most && fabs(r->loss / t->one->loss - 1) <= t->most,
          "sequence %d: gradients off by %g, loss %g, not %g", t->sequence, off, r->loss,
          t->one->loss);
    CHECK(same_bytes(ctx, r, sizeof *r), "the ranks' results differ");
    return 0;
}

static tsh_tensor *input_of(tsh_ctx *ctx, tsh_shape shape) {
    const int64_t n = shape.dim[0] * shape.dim[1] * shape.dim[2];
    float *values = (float *)malloc((size_t)n * sizeof *values);
    tsh_tensor *t;
    for (int64_t e = 0; e < n; e++) values[e] = (float)ranks_number(5, (uint64_t)e) / 4;
    t = tsh_from(ctx, values, shape, TSH_F32);
    free(values);
    return tsh_cast(t, TSH_REAL);
}

static int trains(tsh_ctx *ctx, void *user) {
    const training *t = (const training *)user;
    const int alone = tsh_world(ctx)->size == 1;
    result *r = alone ? t->one : (result *)malloc(sizeof *r);
    int bad;
    const tsh_layout along = tsh_sharded(1), *const rows = t->sequence ? &along : NULL;
    const tsh_plan_rule plan[] = {
        {.path = "up", .style = TSH_COLWISE, .input = rows, .regather = t->sequence},
        {.path = "down", .style = TSH_ROWWISE, .output = rows},
        {.path = "wide", .style = TSH_COLWISE},
        {.path = "narrow", .style = TSH_ROWWISE}};
    const tsh_linear_desc up = {.in = WIDTH, .out = INNER}, down = {.in = INNER, .out = WIDTH};
    const tsh_conv_desc wide = {.in = CHANNELS, .out = 12, .kernel = {3}, .padding = {1}};
    const tsh_conv_desc narrow = {.in = 12, .out = CHANNELS, .kernel = {3}, .padding = {1}};
    tsh_module *net = tsh_root(ctx);
    tsh_tensor *x, *z, *loss;
    tsh_module *layer[4];
    layer[0] = tsh_add_linear(net, "up", &up);
    layer[1] = tsh_add_linear(net, "down", &down);
    layer[2] = tsh_add_conv1d(net, "wide", &wide);
    layer[3] = tsh_add_conv1d(net, "narrow", &narrow);
    CHECK(tsh_parallelize(net, plan, COUNT(plan)) == TSH_OK, "%s", tsh_last_error(ctx)->message);
    x = input_of(ctx, tsh_shape3(1, ROWS, WIDTH));
    if (rows) x = tsh_redistribute(x, along);
    for (int i = 0; i < 2; i++)
        x = tsh_add(x, tsh_forward(layer[1], tsh_gelu(tsh_forward(layer[0], x))));
    z = input_of(ctx, tsh_shape3(1, CHANNELS, LONG));
    for (int i = 0; i < 2; i++)
        z = tsh_add(z, tsh_forward(layer[3], tsh_gelu(tsh_forward(layer[2], z))));
    loss = tsh_full_tensor(tsh_mean(tsh_mul(x, x), TSH_ALL, 0));
    loss = tsh_add(loss, tsh_mean(tsh_mul(z, z), TSH_ALL, 0));
    if (!rows) CHECK(same_everywhere(ctx, x), "the activations of ranks differ");
    CHECK(same_everywhere(ctx, z), "the activations of ranks differ");
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "%s", tsh_last_error(ctx)->message);
    CHECK(same_everywhere(ctx, tsh_grad(tsh_param(layer[1], "bias"))), "gradients of ranks differ");
    memset(r, 0, sizeof *r);
    r->loss = tsh_item(ctx, loss);
    tsh_each_param(net, keep_grad, r);
    bad = alone ? 0 : is_off(ctx, t, r);
    if (!alone) free(r);
    CHECK_OK();
    return bad;
}

static void losses_and_gradients_are_near_those_of_one_rank(void **state) {
    static result one;
    static const double most[] = {4e-3, 1e-2, 0.15}; /* of each wire */
    (void)state;
    for (int w = -1; w < COUNT(wires); w++) { /* -1: activations as they are */
        const tsh_desc desc = {.wire = w < 0 ? TSH_DTYPE_DEFAULT : wires[w].dtype};
        training t = {&one, w < 0 ? 0 : most[w] / 50, w < 0 ? 1e-5 : most[w], 0};
        if (w < 0) ranks_run(1, trains, &t);
        for (int i = 1; i < COUNT(ranks_degrees); i++)
            for (t.sequence = 0; t.sequence < 2; t.sequence++)
                ranks_run_with(ranks_degrees[i], &desc, trains, &t);
    }
}

/* ------------------------------------------------------------------------ mistakes */

static int refuses(tsh_ctx *ctx, void *user) {
    static const tsh_dtype bad[] = {TSH_F32, TSH_F16, TSH_I32, (tsh_dtype)99};
    (void)user;
    for (int i = 0; i < COUNT(bad); i++) {
        const tsh_desc desc = {.wire = bad[i]};
        tsh_ctx *other = NULL;
        CHECK(tsh_open(&desc, &other) == TSH_ERR_DTYPE, "dtype %d", (int)bad[i]);
        CHECK(strstr(tsh_last_error(other)->message, ".wire is bf16 or a dtype of quantised"), "%s",
              tsh_last_error(other)->message);
        tsh_close(other);
    }
    CHECK_OK();
    return 0;
}

static int differ(tsh_ctx *ctx, void *user) {
    tsh_desc desc = {.wire = tsh_world(ctx)->rank ? TSH_Q8_0 : TSH_BF16};
    tsh_ctx *other = NULL;
    (void)user;
    CHECK(tsh_comm_split(tsh_world(ctx), 0, 0, &desc.comm) == TSH_OK, "split");
    CHECK(tsh_open(&desc, &other) == TSH_OK, "open");
    CHECK(tsh_add_module(tsh_root(other), "a", NULL), "a model");
    CHECK(tsh_barrier(tsh_world(other)) == TSH_ERR_MISMATCH, "told");
    CHECK(tsh_last_error(other)->code == TSH_ERR_MISMATCH &&
              strstr(tsh_last_error(other)->message, "the wire q8_0"),
          "%s", tsh_last_error(other)->message);
    tsh_close(other);
    return 0;
}

static void mistakes_are_told(void **state) {
    (void)state;
    ranks_run(1, refuses, NULL);
    ranks_run(2, differ, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layouts_change_in_the_wire_s_dtype),
        cmocka_unit_test(losses_and_gradients_are_near_those_of_one_rank),
        cmocka_unit_test(mistakes_are_told),
    };
    return cmocka_run_group_tests_name("layer/wire", tests, NULL, NULL);
}
