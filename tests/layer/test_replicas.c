/* Data parallelism: the average of gradients, exact however unevenly a batch lies over ranks and
 * micro-batches; the order of its sums; when it travels. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"

/* Sums of gradients over rows, in another order than one rank's. */
#define ROUNDING (sizeof(tsh_real) == 4 ? 2e-6 : 1e-14)

/* ---------------------------------------------------------------------- a model
 * A vocabulary, a sharded MLP, a norm, a tied head: every kind of gradient. */

enum { ROWS = 7, TOKENS = 5, VOCABULARY = 11, WIDTH = 6, HIDDEN = 9, IGNORED = -100 };

static tsh_tensor *call(tsh_module *net, const char *child, tsh_tensor *x) {
    return tsh_forward(tsh_find(net, child), x);
}

static tsh_module *add_net(tsh_ctx *ctx) {
    static const tsh_plan_rule plan[] = {{.path = "table", .style = TSH_ROWWISE},
                                         {.path = "up", .style = TSH_COLWISE},
                                         {.path = "down", .style = TSH_ROWWISE},
                                         {.path = "head", .style = TSH_COLWISE}};
    const tsh_embedding_desc table = {.count = VOCABULARY, .dim = WIDTH};
    const tsh_linear_desc up = {.in = WIDTH, .out = HIDDEN}, down = {.in = HIDDEN, .out = WIDTH};
    const tsh_linear_desc head = {.in = WIDTH, .out = VOCABULARY, .bias = TSH_NO};
    const tsh_layer_norm_desc norm = {.dim = WIDTH};
    tsh_module *net = tsh_root(ctx);
    tsh_add_embedding(net, "table", &table);
    tsh_add_linear(net, "up", &up);
    tsh_add_linear(net, "down", &down);
    tsh_add_layer_norm(net, "norm", &norm);
    tsh_tie(tsh_add_linear(net, "head", &head), "weight", tsh_param(net, "table.weight"));
    tsh_parallelize(net, plan, COUNT(plan));
    tsh_materialize(net);
    return net;
}

static int32_t token(int row, int at) {
    return (int32_t)(ranks_mix(3, (uint64_t)(row * TOKENS + at)) % VOCABULARY);
}

/* A third is ignored, and all of row 2. */
static int32_t target(int row, int at) {
    const uint64_t draw = ranks_mix(4, (uint64_t)(row * TOKENS + at));
    return row == 2 || draw % 3 == 0 ? IGNORED : (int32_t)(draw / 3 % VOCABULARY);
}

/* Rows [from, to): the loss, and over how many targets it is. */
static tsh_tensor *net_loss(tsh_module *net, int from, int to, tsh_reduction reduction,
                            double *targets) {
    const tsh_cross_entropy_desc desc = {.reduction = reduction};
    tsh_ctx *ctx = tsh_ctx_of(tsh_param(net, "up.weight"));
    int32_t ids[ROWS * TOKENS + 1], wanted[ROWS * TOKENS + 1];
    const tsh_shape shape = tsh_shape2(to - from, TOKENS);
    tsh_tensor *x, *t, *loss;
    int i;
    *targets = 0;
    for (i = 0; i < (to - from) * TOKENS; i++) {
        ids[i] = token(from + i / TOKENS, i % TOKENS);
        wanted[i] = target(from + i / TOKENS, i % TOKENS);
        *targets += wanted[i] != IGNORED;
    }
    x = tsh_tensor_from(ctx, TSH_I32, shape, tsh_replicated(), ids);
    t = tsh_tensor_from(ctx, TSH_I32, shape, tsh_replicated(), wanted);
    loss = call(net, "table", x);
    loss = tsh_add(loss, call(net, "down", tsh_gelu(call(net, "up", loss))));
    loss = tsh_cross_entropy(call(net, "head", call(net, "norm", loss)), t, &desc);
    tsh_tensor_free(x);
    tsh_tensor_free(t);
    return loss;
}

static const char *const net_params[] = {"table.weight", "up.weight",   "up.bias",  "down.weight",
                                         "down.bias",    "norm.weight", "norm.bias"};

static int capture_gradients(tsh_ctx *ctx, tsh_module *net, capture *got) {
    int i;
    for (i = 0; i < COUNT(net_params); i++)
        CHECK(!capture_add(ctx, got, tsh_grad(tsh_param(net, net_params[i]))), "%s", net_params[i]);
    return 0;
}

/* ------------------------------------------------------------ the exact average */

typedef struct dealing {
    int micro;     /* batches of a step on every rank */
    int sync;      /* the last one is deferred too */
    capture *want; /* of the whole batch on one rank */
} dealing;

static int whole_batch(tsh_ctx *ctx, void *user) {
    capture *want = (capture *)user;
    tsh_module *net = add_net(ctx);
    double targets;
    CHECK(tsh_backward(ctx, net_loss(net, 0, ROWS, TSH_REDUCE_MEAN, &targets)) == TSH_OK, "mean");
    return capture_gradients(ctx, net, want);
}

/* Slot s of n has rows as torch.chunk deals them: the last ones may have none. */
static int first_row(int s, int n) {
    const int each = (ROWS + n - 1) / n;
    return s * each < ROWS ? s * each : ROWS;
}

static int dealt_batch(tsh_ctx *ctx, void *user) {
    const dealing *d = (const dealing *)user;
    tsh_comm *dp = tsh_dp(ctx), *tp = tsh_tp(ctx);
    const int slots = dp->size * d->micro;
    tsh_module *net = add_net(ctx);
    capture got = {.count = 0};
    int m, failed;
    for (m = 0; m < d->micro; m++) {
        const int s = dp->rank * d->micro + m, last = m == d->micro - 1 && !d->sync;
        const tsh_comm_stats before = dp->stats;
        tsh_backward_desc how = {.defer = !last, .summed = 1};
        uint64_t over_tp;
        tsh_tensor *loss = net_loss(net, first_row(s, slots), first_row(s + 1, slots),
                                    TSH_REDUCE_SUM, &how.weight);
        over_tp = tp->stats.calls[TSH_ALLREDUCE];
        CHECK(tsh_backward_with(ctx, loss, &how) == TSH_OK, "micro-batch %d", m);
        CHECK(tsh_step_end(ctx) == TSH_OK, "step");
        if (last) continue;
        CHECK(memcmp(&before, &dp->stats, sizeof before) == 0, "nothing travels in between");
        CHECK(tp->size == 1 || tp->stats.calls[TSH_ALLREDUCE] - over_tp <= 2,
              "over tp, what the activations need");
        if (dp->size * d->micro == 1) continue;
        CHECK(!tsh_grad(tsh_param(net, "up.bias")), "it is pending");
        CHECK(tsh_last_error(ctx)->code == TSH_ERR_STATE, "and says so");
        tsh_clear_error(ctx);
    }
    if (d->sync) CHECK(tsh_sync_grads(ctx) == TSH_OK, "sync");
    if (capture_gradients(ctx, net, &got)) return 1;
    failed = capture_compare(ctx, "the average", d->want, &got, ROUNDING);
    capture_free(&got);
    return failed;
}

static void the_average_is_exact_for_any_dealing(void **state) {
    static const int worlds[][2] = {{1, 1}, {2, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 2}, {2, 4}, {1, 8}};
    capture want = {.count = 0};
    int i;
    (void)state;
    ranks_run(1, whole_batch, &want);
    for (i = 0; i < COUNT(worlds); i++) {
        const tsh_desc desc = {.tp = worlds[i][0]};
        dealing d = {.want = &want};
        for (d.micro = 1; d.micro <= 3; d.micro++)
            for (d.sync = 0; d.sync < 2; d.sync++)
                ranks_run_with(worlds[i][0] * worlds[i][1], &desc, dealt_batch, &d);
    }
    capture_free(&want);
}

/* Means count every rank and micro-batch alike: another number, where they are uneven. */
static int mean_of_means(tsh_ctx *ctx, void *user) {
    const capture *want = (const capture *)user;
    tsh_module *net = add_net(ctx);
    const tsh_real *bias;
    double targets, apart = 0;
    int from = tsh_dp(ctx)->rank ? 1 : 0, to = tsh_dp(ctx)->rank ? ROWS : 1, e;
    CHECK(tsh_backward(ctx, net_loss(net, from, to, TSH_REDUCE_MEAN, &targets)) == TSH_OK, "mean");
    bias = (const tsh_real *)tsh_data(ctx, tsh_grad(tsh_param(net, "norm.bias")));
    CHECK(bias, "a gradient");
    for (e = 0; e < WIDTH; e++)
        apart += fabs((double)bias[e] - want->values[COUNT(net_params) - 1][e]);
    CHECK(apart > 1e-3, "one row of %d counts as much as the others: %g", ROWS, apart);
    return 0;
}

static void means_count_every_rank_alike(void **state) {
    const tsh_desc desc = {.tp = 1};
    capture want = {.count = 0};
    (void)state;
    ranks_run(1, whole_batch, &want);
    ranks_run_with(2, &desc, mean_of_means, &want);
    capture_free(&want);
}

static int no_elements(tsh_ctx *ctx, void *user) {
    tsh_module *net = add_net(ctx);
    tsh_backward_desc how = {.summed = 1};
    capture got = {.count = 0};
    int i;
    int64_t e;
    (void)user;
    CHECK(tsh_backward_with(ctx, net_loss(net, 2, 3, TSH_REDUCE_SUM, &how.weight), &how) == TSH_OK,
          "all are ignored");
    CHECK(!(how.weight > 0), "all are ignored");
    if (capture_gradients(ctx, net, &got)) return 1;
    for (i = 0; i < got.count; i++)
        for (e = 0; e < got.numel[i]; e++) CHECK(!(fabs(got.values[i][e]) > 0), "they are 0");
    capture_free(&got);
    return 0;
}

static void a_batch_without_elements_gives_zeros(void **state) {
    const tsh_desc desc = {.tp = 1};
    (void)state;
    ranks_run(1, no_elements, NULL);
    ranks_run_with(3, &desc, no_elements, NULL);
}

static int refused(tsh_ctx *ctx, const tsh_backward_desc *how, tsh_result code, const char *part) {
    tsh_module *net = tsh_root(ctx);
    double targets;
    CHECK(tsh_backward_with(ctx, net_loss(net, 0, 1, TSH_REDUCE_SUM, &targets), how) == code, "%s",
          part);
    CHECK(strstr(tsh_last_error(ctx)->message, part), "%s", part);
    tsh_clear_error(ctx);
    CHECK(tsh_step_end(ctx) == TSH_OK, "it can be cleared");
    return 0;
}

/* Without a world to be told of an error: so it can be cleared. */
static int refusals(tsh_ctx *ctx, void *user) {
    const tsh_backward_desc sum = {.summed = 1, .weight = 1}, mean = {.defer = 1};
    const tsh_backward_desc later = {.defer = 1, .summed = 1, .weight = 1};
    const tsh_backward_desc bad[] = {{.weight = 3},
                                     {.summed = 1, .weight = -1},
                                     {.summed = 1, .weight = (double)NAN},
                                     {.summed = 1, .weight = (double)INFINITY}};
    tsh_module *net = add_net(ctx);
    double targets;
    int i;
    (void)user;
    for (i = 0; i < COUNT(bad); i++)
        if (refused(ctx, &bad[i], TSH_ERR_ARGUMENT, "tsh_backward: weight ")) return 1;
    (void)tsh_backward_with(ctx, net_loss(net, 0, 1, TSH_REDUCE_SUM, &targets), &mean);
    if (refused(ctx, &sum, TSH_ERR_STATE, "all means or all sums")) return 1;
    tsh_zero_grads(net); /* then nothing waits any more */
    (void)tsh_backward_with(ctx, net_loss(net, 0, 1, TSH_REDUCE_SUM, &targets), &later);
    if (refused(ctx, &mean, TSH_ERR_STATE, "wait for tsh_sync_grads are sums")) return 1;
    CHECK(tsh_sync_grads(ctx) == TSH_OK, "sync");
    if (refused(ctx, &sum, TSH_ERR_STATE, "tsh_zero_grads first")) return 1;
    return 0;
}

static void sums_and_means_do_not_mix(void **state) {
    (void)state;
    ranks_failure[0][0] = '\0';
    if (tsh_run(NULL, refusals, NULL)) fail_msg("%s", ranks_failure[0]);
}

/* Micro-batches whose gradients were zeroed count no more. */
static int given_up(tsh_ctx *ctx, void *user) {
    const capture *want = (const capture *)user;
    tsh_module *net = add_net(ctx);
    tsh_backward_desc how = {.defer = 1, .summed = 1};
    capture got = {.count = 0};
    int failed;
    (void)tsh_backward_with(ctx, net_loss(net, 0, 4, TSH_REDUCE_SUM, &how.weight), &how);
    tsh_zero_grads(net);
    how.defer = 0;
    (void)tsh_backward_with(ctx, net_loss(net, 0, ROWS, TSH_REDUCE_SUM, &how.weight), &how);
    if (capture_gradients(ctx, net, &got)) return 1;
    failed = capture_compare(ctx, "the second batch", want, &got, ROUNDING);
    capture_free(&got);
    return failed;
}

static void zeroed_micro_batches_have_no_weight(void **state) {
    const tsh_desc desc = {.tp = 1};
    capture want = {.count = 0};
    (void)state;
    ranks_run(1, whole_batch, &want);
    ranks_run(1, given_up, &want);
    ranks_run_with(2, &desc, given_up, &want); /* both have the whole batch */
    capture_free(&want);
}

/* ------------------------------------------------------ the order of its sums */

enum { REPLICAS = 8 };

/* What replica r alone finds: its batch is rows [r % 4, r % 4 + 3). */
typedef struct alone {
    int replica;
    capture found;
} alone;

static tsh_tensor *replica_loss(tsh_module *net, int replica) {
    double targets;
    return net_loss(net, replica % 4, replica % 4 + 3, TSH_REDUCE_MEAN, &targets);
}

static int one_replica(tsh_ctx *ctx, void *user) {
    alone *a = (alone *)user;
    tsh_module *net = add_net(ctx);
    CHECK(tsh_backward(ctx, replica_loss(net, a->replica)) == TSH_OK, "backward");
    return capture_gradients(ctx, net, &a->found);
}

typedef struct ways {
    int defer, checkpoint;
    const alone *each; /* REPLICAS of them */
} ways;

/* Element e of parameter i, averaged over dp in the order of the contract. */
static tsh_real ring_average(const alone *each, int dp, int i, int64_t e) {
    const int64_t n = each[0].found.numel[i];
    tsh_real sum;
    int k = 0, j;
    while (tshb_coll_chunk(n, dp, k + 1) <= e) k++;
    sum = (tsh_real)each[(k + 1) % dp].found.values[i][e];
    for (j = 2; j <= dp; j++) sum += (tsh_real)each[(k + j) % dp].found.values[i][e];
    return sum / (tsh_real)dp;
}

static int averages(tsh_ctx *ctx, void *user) {
    const ways *w = (const ways *)user;
    const tsh_backward_desc how = {.defer = w->defer};
    tsh_module *net = add_net(ctx);
    capture got = {.count = 0};
    int i;
    int64_t e;
    if (w->checkpoint) tsh_checkpoint(tsh_find(net, "up"), 1);
    if (w->checkpoint) tsh_checkpoint(tsh_find(net, "head"), 1);
    CHECK(tsh_backward_with(ctx, replica_loss(net, tsh_dp(ctx)->rank), &how) == TSH_OK, "backward");
    if (w->defer) CHECK(tsh_sync_grads(ctx) == TSH_OK, "sync");
    if (capture_gradients(ctx, net, &got)) return 1;
    for (i = 0; i < got.count; i++)
        for (e = 0; e < got.numel[i]; e++) {
            const double want = (double)ring_average(w->each, tsh_dp(ctx)->size, i, e);
            CHECK(got.values[i][e] == want, "%s, element %ld: %.9g, not %.9g", net_params[i],
                  (long)e, got.values[i][e], want);
        }
    capture_free(&got);
    return 0;
}

/* Bit for bit, whatever the buckets hold and whenever they travel. */
static void the_order_of_sums_is_that_of_each_leaf_alone(void **state) {
    static const size_t bytes[] = {0, 1, 100, 300, 4096};
    static const int sizes[] = {2, 3, 4, 8};
    alone each[REPLICAS];
    ways w = {.each = each};
    int i, d;
    (void)state;
    memset(each, 0, sizeof each);
    for (i = 0; i < REPLICAS; i++) {
        each[i].replica = i;
        ranks_run(1, one_replica, &each[i]);
    }
    for (d = 0; d < COUNT(sizes); d++)
        for (i = 0; i < COUNT(bytes); i++) {
            tsh_desc desc = {.tp = 1, .bucket_bytes = bytes[i]};
            for (desc.no_overlap = 0; desc.no_overlap < 2; desc.no_overlap++)
                for (w.defer = 0; w.defer < 2; w.defer++)
                    for (w.checkpoint = 0; w.checkpoint < 2; w.checkpoint++)
                        ranks_run_with(sizes[d], &desc, averages, &w);
        }
    for (i = 0; i < REPLICAS; i++) capture_free(&each[i].found);
}

/* --------------------------------------------------------------- when it travels */

/* An op whose backward runs last: what has travelled by then. */
typedef struct witness {
    tsh_ctx *ctx;
    uint64_t calls;
    int fails; /* on the rank of dp with this number; -1: on none */
} witness;

/* Gradients' messages over dp: with zero, reduce-scatters. */
static uint64_t started(const tsh_comm *dp) {
    return dp->stats.calls[TSH_ALLREDUCE] + dp->stats.calls[TSH_REDUCE_SCATTER];
}

static void witness_forward(tsh_tensor *const *in, int n, void *const *out, void *user) {
    tsh_real *y = (tsh_real *)out[0];
    const witness *w = (const witness *)user;
    (void)n;
    memcpy(y, tsh_data(w->ctx, in[0]), (size_t)tsh_local_numel(in[0]) * sizeof *y);
}

static void witness_backward(tsh_tensor *const *in, int n, const void *const *out,
                             const tsh_real *const *grad_out, tsh_real *const *grad_in,
                             void *user) {
    const tsh_real *dy = grad_out[0];
    witness *w = (witness *)user;
    int64_t e;
    (void)n, (void)out;
    w->calls = started(tsh_dp(w->ctx));
    if (w->fails == tsh_dp(w->ctx)->rank) tsh_fail(w->ctx, TSH_ERR_STATE, "backward: the witness");
    for (e = 0; e < tsh_local_numel(in[0]); e++) grad_in[0][e] += dy[e];
}

/* Layers after the witness, which sees the gradients of all but the first. */
static tsh_tensor *witnessed(tsh_ctx *ctx, witness *w, int layers) {
    const tsh_shape shape = tsh_shape2(3, WIDTH);
    const tsh_custom_op_desc custom = {.name = "witness",
                                       .out[0].shape = shape,
                                       .out[0].layout = tsh_replicated(),
                                       .forward = witness_forward,
                                       .backward = witness_backward,
                                       .user = w};
    const tsh_linear_desc linear = {.in = WIDTH, .out = WIDTH};
    tsh_module *net = tsh_root(ctx);
    tsh_tensor *x;
    char name[24];
    int i;
    for (i = 0; i <= layers; i++) {
        (void)snprintf(name, sizeof name, "%d", i);
        tsh_add_linear(net, name, &linear);
    }
    w->ctx = ctx;
    w->calls = 0;
    x = tsh_forward(tsh_find(net, "0"), tsh_scale(tsh_ones(ctx, shape), 1 + tsh_dp(ctx)->rank));
    x = tsh_custom_op(ctx, &x, 1, NULL, &custom);
    for (i = 1; i <= layers; i++) {
        (void)snprintf(name, sizeof name, "%d", i);
        x = tsh_forward(tsh_find(net, name), x);
    }
    return tsh_sum(x, TSH_ALL, 0);
}

typedef struct travel {
    int layers, seen, all; /* messages until the witness's backward, and until the end */
    int zero;
} travel;

static int travels(tsh_ctx *ctx, void *user) {
    const travel *t = (const travel *)user;
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .zero = t->zero};
    witness w = {.fails = -1};
    tsh_comm *dp = tsh_dp(ctx);
    uint64_t before;
    tsh_tensor *loss = witnessed(ctx, &w, t->layers);
    CHECK(tsh_materialize(tsh_root(ctx)) == TSH_OK, "parameters");
    CHECK(tsh_optim_new(tsh_root(ctx), &adam), "optimiser");
    before = started(dp);
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
    CHECK((int)(w.calls - before) == t->seen, "%d on their way, not %d", (int)(w.calls - before),
          t->seen);
    CHECK((int)(started(dp) - before) == t->all, "%d in all, not %d", (int)(started(dp) - before),
          t->all);
    CHECK(dp->in_flight == 0, "all are waited for");
    return 0;
}

/* Weights of 36 and biases of 6: a layer has 42 elements. */
static void gradients_travel_while_backward_goes_on(void **state) {
    const size_t width = sizeof(tsh_real);
    const struct {
        size_t bytes;
        int no_overlap;
        travel t;
    } rows[] = {
        {1, 0, {4, 8, 10, 0}},         /* each leaf as soon as it is there */
        {1, 1, {4, 0, 10, 0}},         /* each, at the end */
        {42 * width, 0, {4, 4, 5, 0}}, /* one per layer */
        {84 * width, 0, {4, 2, 3, 0}}, /* one per two layers, the last one half full */
        {36 * width, 0, {4, 4, 6, 0}}, /* weights alone, 6 biases in one */
        {84 * width, 1, {4, 0, 3, 0}}, /* as many, later */
        {0, 0, {4, 0, 1, 0}},          /* all in one */
        {1, 0, {50, 100, 102, 0}},     /* more than may be in flight */
        {1, 1, {50, 0, 102, 0}},
    };
    int i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        tsh_desc desc = {.tp = 1, .bucket_bytes = rows[i].bytes, .no_overlap = rows[i].no_overlap};
        travel t = rows[i].t;
        for (t.zero = 0; t.zero < 2; t.zero++) {
            ranks_run_with(2, &desc, travels, &t);
            ranks_run_with(3, &desc, travels, &t);
        }
        t.seen = t.all = 0; /* alone, nothing */
        ranks_run_with(1, &desc, travels, &t);
    }
}

/* A rank that fails while gradients travel: one error on all, and nobody is waited for in vain. */
static int fails(tsh_ctx *ctx, void *user) {
    const int *who = (const int *)user;
    witness w = {.fails = *who};
    (void)tsh_barrier(tsh_world(ctx)); /* nobody fails before all ranks are open */
    CHECK(tsh_backward(ctx, witnessed(ctx, &w, 4)) == TSH_ERR_STATE, "an error on every rank");
    CHECK(strstr(tsh_last_error(ctx)->message, "backward: the witness"), "the same");
    CHECK(tsh_last_error(ctx)->rank == *who, "of rank %d", tsh_last_error(ctx)->rank);
    return 0;
}

static void a_rank_that_fails_meanwhile_is_one_error(void **state) {
    int who, late;
    (void)state;
    for (who = 0; who < 3; who++)
        for (late = 0; late < 2; late++) {
            const tsh_desc desc = {.tp = 1, .bucket_bytes = 1, .no_overlap = late};
            ranks_run_with(3, &desc, fails, &who);
        }
}

/* ------------------------------------------------------------------ checkpoints
 * Backward computes a checkpoint's inside anew: what its parameters get is known before, also of
 * one that two share; of a leaf that is not below it, it comes unexpected. */

static tsh_tensor *borrow(tsh_module *module, tsh_tensor **in, int n, void *user) {
    (void)n;
    return tsh_mul(tsh_forward(tsh_child(module, 0), in[0]), (tsh_tensor *)user);
}

typedef struct sharing {
    int checkpoint;
    capture want; /* without checkpoints */
} sharing;

static int shares(tsh_ctx *ctx, void *user) {
    sharing *s = (sharing *)user;
    const tsh_linear_desc d = {.in = WIDTH, .out = WIDTH, .bias = TSH_NO};
    tsh_tensor *scale = tsh_requires_grad(
        tsh_keep(tsh_scale(tsh_ones(ctx, tsh_shape1(WIDTH)), 0.5)), 1);
    const tsh_module_desc as_part = {.forward = borrow, .user = scale};
    tsh_module *net = tsh_root(ctx), *part[3];
    tsh_tensor *x = tsh_scale(tsh_ones(ctx, tsh_shape2(2, WIDTH)), 1 + tsh_dp(ctx)->rank);
    capture got = {.count = 0};
    uint64_t before;
    int i;
    tsh_average_grad(scale, 1);
    for (i = 0; i < 3; i++) {
        static const char *const names[] = {"a", "b", "c"};
        part[i] = tsh_add_module(net, names[i], &as_part);
        tsh_add_linear(part[i], "l", &d);
        if (i) tsh_tie(tsh_find(part[i], "l"), "weight", tsh_param(part[0], "l.weight"));
        tsh_checkpoint(part[i], s->checkpoint);
    }
    for (i = 0; i < 3; i++) x = tsh_forward(part[i], x);
    before = tsh_dp(ctx)->stats.calls[TSH_ALLREDUCE];
    CHECK(tsh_backward(ctx, tsh_sum(x, TSH_ALL, 0)) == TSH_OK, "backward");
    before = tsh_dp(ctx)->stats.calls[TSH_ALLREDUCE] - before;
    /* the weight once; what is borrowed, once each time it comes in a checkpoint */
    CHECK(before == (s->checkpoint ? 4u : 2u), "%d all-reduces", (int)before);
    CHECK(!capture_add(ctx, &got, tsh_grad(tsh_param(part[0], "l.weight"))), "weight");
    CHECK(!capture_add(ctx, &got, tsh_grad(scale)), "scale");
    i = s->checkpoint && capture_compare(ctx, "checkpoints", &s->want, &got, ROUNDING);
    if (!s->checkpoint && tsh_world(ctx)->rank == 0)
        s->want = got;
    else
        capture_free(&got);
    return i;
}

static void checkpoints_send_shared_leaves_once(void **state) {
    const tsh_desc desc = {.tp = 1, .bucket_bytes = 1};
    sharing s = {.checkpoint = 0};
    (void)state;
    ranks_run_at(RANKS_EACH, 2, &desc, shares, &s);
    s.checkpoint = 1;
    ranks_run_with(2, &desc, shares, &s);
    capture_free(&s.want);
}

/* x times the user's leaf. */
static tsh_tensor *multiply(tsh_module *module, tsh_tensor **in, int n, void *user) {
    (void)module, (void)n;
    return tsh_mul(in[0], (tsh_tensor *)user);
}

static tsh_tensor *rows_of(tsh_ctx *ctx, int rows, double value) {
    tsh_tensor *leaf = tsh_keep(tsh_scale(tsh_ones(ctx, tsh_shape2(rows, WIDTH)), value));
    return tsh_average_grad(tsh_requires_grad(leaf, 1), 1);
}

/* A leaf's gradient leaves with another one's; more of it comes from a checkpoint, and leaves alone
 * where x is too large for a bucket with others. */
static int goes_twice(tsh_ctx *ctx, void *user) {
    tsh_tensor *twice = rows_of(ctx, 1, 0.5), *once = rows_of(ctx, 1, 2), *x = rows_of(ctx, 2, 1);
    tsh_tensor *y;
    const tsh_module_desc as_part = {.forward = multiply, .user = twice};
    tsh_module *part = tsh_add_module(tsh_root(ctx), "part", &as_part);
    const tsh_real *g;
    int i;
    (void)user;
    tsh_checkpoint(part, 1);
    y = tsh_mul(tsh_mul(tsh_forward(part, x), twice), once);
    y = tsh_scale(tsh_sum(y, TSH_ALL, 0), 1 + tsh_dp(ctx)->rank);
    CHECK(tsh_backward(ctx, y) == TSH_OK, "backward");
    g = (const tsh_real *)tsh_data(ctx, tsh_grad(twice));
    for (i = 0; i < WIDTH; i++) CHECK(g[i] == 6, "slope %d is %g", i, (double)g[i]);
    g = (const tsh_real *)tsh_data(ctx, tsh_grad(once));
    for (i = 0; i < WIDTH; i++) CHECK(g[i] == (tsh_real)0.75, "slope %d is %g", i, (double)g[i]);
    return 0;
}

static void what_comes_late_is_added(void **state) {
    const size_t row = WIDTH * sizeof(tsh_real), bytes[] = {1, row, row + 1, 2 * row, 1 << 20};
    int i;
    (void)state;
    for (i = 0; i < COUNT(bytes); i++) {
        const tsh_desc desc = {.tp = 1, .bucket_bytes = bytes[i]};
        ranks_run_with(2, &desc, goes_twice, NULL);
    }
}

/* Rows of a table, in a checkpoint that it is not below. */
static tsh_tensor *look_up(tsh_module *module, tsh_tensor **in, int n, void *user) {
    const tsh_lookup_desc sparse = {.sparse = 1};
    tsh_ctx *ctx = tsh_ctx_of(in[0]);
    (void)module, (void)n;
    return tsh_add(in[0],
                   tsh_embedding(tsh_arange(ctx, TSH_I32, 1, 3, 1), (tsh_tensor *)user, &sparse));
}

/* The whole table's gradient has left when a few rows more come: all rows learn all the same. */
static int looks_up(tsh_ctx *ctx, void *user) {
    sharing *s = (sharing *)user;
    const tsh_embedding_desc rows = {.count = VOCABULARY, .dim = WIDTH};
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .lr = 0.1};
    tsh_module *net = tsh_root(ctx), *table = tsh_add_embedding(net, "table", &rows);
    tsh_tensor *weight = tsh_param(table, "weight");
    const tsh_module_desc as_part = {.forward = look_up, .user = weight};
    tsh_module *part = tsh_add_module(net, "part", &as_part);
    tsh_tensor *x = tsh_requires_grad(
        tsh_keep(tsh_scale(tsh_ones(ctx, tsh_shape2(2, WIDTH)), 1 + tsh_dp(ctx)->rank)), 1);
    capture got = {.count = 0};
    tsh_optim *optim = tsh_optim_new(net, &adam);
    int failed;
    tsh_checkpoint(part, s->checkpoint);
    CHECK(tsh_materialize(net) == TSH_OK, "parameters");
    x = tsh_linear(tsh_forward(part, x), weight, NULL); /* all rows */
    CHECK(tsh_backward(ctx, tsh_sum(tsh_mul(x, x), TSH_ALL, 0)) == TSH_OK, "backward");
    CHECK(!capture_add(ctx, &got, tsh_grad(weight)), "gradient");
    CHECK(tsh_optim_step(optim) == TSH_OK, "step");
    CHECK(!capture_add(ctx, &got, weight), "weight");
    failed = s->checkpoint && capture_compare(ctx, "a table", &s->want, &got, ROUNDING);
    if (!s->checkpoint && tsh_world(ctx)->rank == 0)
        s->want = got;
    else
        capture_free(&got);
    return failed;
}

static void rows_that_come_late_leave_a_gradient_whole(void **state) {
    static const size_t bytes[] = {1, 1 << 20};
    sharing s = {.checkpoint = 0};
    int i;
    (void)state;
    for (i = 0; i < COUNT(bytes); i++) {
        const tsh_desc desc = {.tp = 1, .bucket_bytes = bytes[i]};
        s.checkpoint = 0;
        ranks_run_at(RANKS_EACH, 2, &desc, looks_up, &s);
        s.checkpoint = 1;
        ranks_run_with(2, &desc, looks_up, &s);
        capture_free(&s.want);
    }
}

/* ------------------------------------------------------------------ leaves of one's own */

typedef struct leaves {
    int zero, summed, micro;
} leaves;

/* Of rows x_r^2 + y on rank r of dp, r + 1 of them, beside a layer. An input x = r keeps the
 * gradient of its own rank's loss; y, which asks for it, is averaged as the layer's weight is. */
static int own_leaves(tsh_ctx *ctx, void *user) {
    const leaves *l = (const leaves *)user;
    const int dp = tsh_dp(ctx)->size, rank = tsh_dp(ctx)->rank, rows = rank + 1;
    const tsh_linear_desc d = {.in = WIDTH, .out = 1, .bias = TSH_NO, .style = TSH_ROWWISE};
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .zero = l->zero};
    const double all = dp * (dp + 1) / 2.0; /* rows of a micro-batch */
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "layer", &d);
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), &adam);
    tsh_tensor *x = tsh_requires_grad(tsh_keep(tsh_full(ctx, tsh_shape1(1), rank)), 1), *loss;
    tsh_tensor *y = tsh_requires_grad(tsh_keep(tsh_full(ctx, tsh_shape1(1), 2)), 1), *g;
    const double times = l->summed ? 1 : l->micro;
    const double of_x = 2 * rank * rows * times / (l->summed ? all : 1);
    const double of_y = l->summed ? 1 : all / dp * times;
    int m, averaged = 1;
    CHECK(tsh_average_grad(y, 1) == y, "asked for");
    for (m = 0; m < l->micro; m++) {
        const tsh_backward_desc how = {.defer = m < l->micro - 1, .summed = l->summed,
                                       .weight = l->summed ? rows : 0};
        loss = tsh_scale(tsh_add(tsh_mul(x, x), y), rows);
        loss = tsh_add(loss, tsh_forward(layer, tsh_ones(ctx, tsh_shape1(WIDTH))));
        loss = tsh_reshape(loss, tsh_shape0());
        CHECK(tsh_backward_with(ctx, loss, &how) == TSH_OK, "backward");
        if (!how.defer) break;
        g = tsh_grad(x);
        CHECK((g == NULL) == l->summed, "its own gradient waits for nobody but a sum of weights");
        tsh_clear_error(ctx);
        CHECK(!tsh_grad(y) && strstr(tsh_last_error(ctx)->message, "pending"), "pending");
        tsh_clear_error(ctx);
    }
    CHECK(fabs(tsh_item(ctx, tsh_grad(x)) - of_x) < 1e-5, "x: %g, not %g",
          tsh_item(ctx, tsh_grad(x)), of_x);
    CHECK(fabs(tsh_item(ctx, tsh_grad(y)) - of_y) < 1e-5, "y: %g, not %g",
          tsh_item(ctx, tsh_grad(y)), of_y);
    CHECK(tsh_optim_step(optim) == TSH_OK && tsh_check_replicas(tsh_root(ctx)), "replicas");
    averaged = !tsh_average_grad(tsh_param(layer, "weight"), 0);
    CHECK(averaged && strstr(tsh_last_error(ctx)->message, "\"layer.weight\", is always averaged"),
          "a parameter's always is");
    tsh_clear_error(ctx);
    CHECK(!tsh_average_grad(tsh_ones(ctx, tsh_shape0()), 1), "a step tensor");
    tsh_clear_error(ctx);
    return 0;
}

static void leaves_are_averaged_on_request_only(void **state) {
    static const int worlds[][2] = {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 2}};
    int i;
    (void)state;
    for (i = 0; i < COUNT(worlds) * 8; i++) {
        const int *world = worlds[i / 8];
        const tsh_desc desc = {.tp = world[0]};
        leaves l = {.zero = i & 1, .summed = i >> 1 & 1, .micro = 1 + (i >> 2 & 1)};
        if (world[0] * world[1] > 1) ranks_run_with(world[0] * world[1], &desc, own_leaves, &l);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_average_is_exact_for_any_dealing),
        cmocka_unit_test(means_count_every_rank_alike),
        cmocka_unit_test(a_batch_without_elements_gives_zeros),
        cmocka_unit_test(sums_and_means_do_not_mix),
        cmocka_unit_test(zeroed_micro_batches_have_no_weight),
        cmocka_unit_test(the_order_of_sums_is_that_of_each_leaf_alone),
        cmocka_unit_test(gradients_travel_while_backward_goes_on),
        cmocka_unit_test(a_rank_that_fails_meanwhile_is_one_error),
        cmocka_unit_test(checkpoints_send_shared_leaves_once),
        cmocka_unit_test(what_comes_late_is_added),
        cmocka_unit_test(leaves_are_averaged_on_request_only),
        cmocka_unit_test(rows_that_come_late_leave_a_gradient_whole),
    };
    return cmocka_run_group_tests_name("layer/replicas", tests, NULL, NULL);
}
