/* ZeRO stage 1: an optimiser's moments cut over data-parallel ranks give the bits of whole ones, in
 * steps, norms, files and new layouts, in a part of their memory. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"

enum { WIDTH = 7, HIDDEN = 13, TINY = 3, STEPS = 4, HASHES = 16 };

static const tsh_plan_rule plan[] = {{.path = "up", .style = TSH_COLWISE},
                                     {.path = "down", .style = TSH_ROWWISE}};

/* Sizes that divide nothing; three elements on eight ranks. */
static tsh_module *add_net(tsh_ctx *ctx, int sharded) {
    const tsh_linear_desc up = {.in = WIDTH, .out = HIDDEN}, down = {.in = HIDDEN, .out = WIDTH};
    const tsh_linear_desc last = {.in = WIDTH, .out = TINY};
    const tsh_layer_norm_desc norm = {.dim = WIDTH};
    tsh_module *net = tsh_root(ctx);
    tsh_add_linear(net, "up", &up);
    tsh_add_linear(net, "down", &down);
    tsh_add_layer_norm(net, "norm", &norm);
    tsh_add_linear(net, "last", &last);
    if (sharded) tsh_parallelize(net, plan, COUNT(plan));
    tsh_materialize(net);
    return net;
}

/* A batch of this replica's own, with gradients of all sizes. */
static tsh_tensor *net_loss(tsh_ctx *ctx, int step) {
    const double own = 1 + 0.37 * tsh_dp(ctx)->rank + step;
    tsh_tensor *x = tsh_scale(tsh_randn(ctx, tsh_shape2(5, WIDTH)), own);
    x = tsh_gelu(tsh_forward(tsh_root(ctx), x));
    return tsh_sum(tsh_mul(x, tsh_scale(x, own)), TSH_ALL, 0);
}

typedef struct hashes {
    uint64_t each[HASHES];
    int count;
} hashes;

static void add_hash(const char *path, tsh_tensor *param, void *user) {
    hashes *h = (hashes *)user;
    (void)path;
    if (h->count < HASHES) h->each[h->count++] = tsh_hash(tsh_ctx_of(param), param);
}

/* ------------------------------------------------------------------ the same bits */

typedef struct course {
    tsh_optim_desc optim;
    int again;         /* laid anew in the middle */
    int summed, micro; /* losses are sums; micro-batches of a step */
    hashes want[STEPS];
    double norm[STEPS];
} course;

static int one_step(tsh_ctx *ctx, const course *c, tsh_optim *optim, int step) {
    int m;
    for (m = 0; m <= c->micro; m++) {
        const tsh_backward_desc how = {
            .defer = m < c->micro, .summed = c->summed, .weight = c->summed ? m + 2 : 0};
        CHECK(tsh_backward_with(ctx, net_loss(ctx, step), &how) == TSH_OK, "backward");
        (void)tsh_step_end(ctx);
    }
    CHECK(tsh_optim_step(optim) == TSH_OK, "step %d", step);
    tsh_zero_grads(tsh_root(ctx));
    return 0;
}

/* Whole moments on rank 0 tell what is wanted; chunks must give the same on every rank. */
static int runs(tsh_ctx *ctx, void *user) {
    course *c = (course *)user;
    tsh_module *net = add_net(ctx, !c->again);
    tsh_optim *optim = tsh_optim_new(net, &c->optim);
    int step, i;
    (void)tsh_optim_group(optim, "*.bias", 0.5, 0);
    for (step = 0; step < STEPS; step++) {
        hashes got = {.count = 0};
        if (c->again && step == 2)
            CHECK(tsh_parallelize(net, plan, COUNT(plan)) == TSH_OK, "laid anew");
        if (one_step(ctx, c, optim, step)) return 1;
        tsh_each_param(net, add_hash, &got);
        if (!c->optim.zero && tsh_world(ctx)->rank == 0) {
            c->want[step] = got;
            c->norm[step] = tsh_optim_state(optim).norm;
        }
        if (!c->optim.zero) continue;
        CHECK(tsh_optim_state(optim).norm == c->norm[step], "step %d: norm %.17g, not %.17g", step,
              tsh_optim_state(optim).norm, c->norm[step]);
        for (i = 0; i < got.count; i++)
            CHECK(got.each[i] == c->want[step].each[i], "step %d, parameter %d", step, i);
    }
    CHECK_OK();
    return 0;
}

static void prove(course *c, int ranks, tsh_desc *desc) {
    static const size_t bytes[] = {0, 1, 200};
    int b;
    c->optim.zero = 0;
    ranks_run_at(RANKS_EACH, ranks, desc, runs, c);
    c->optim.zero = 1;
    for (b = 0; b < COUNT(bytes); b++)
        for (desc->no_overlap = 0; desc->no_overlap < 2; desc->no_overlap++) {
            desc->bucket_bytes = bytes[b];
            ranks_run_with(ranks, desc, runs, c);
        }
    desc->bucket_bytes = 0;
    desc->no_overlap = 0;
}

static void chunks_give_the_bits_of_whole_moments(void **state) {
    static const tsh_optim_desc descs[] = {
        {.kind = TSH_ADAMW, .lr = 0.01, .weight_decay = 0.1, .clip_norm = 1},
        {.kind = TSH_ADAM, .lr = 0.01},
        {.kind = TSH_SGD, .lr = 1e-4, .momentum = 0.9, .nesterov = 1},
        {.kind = TSH_SGD, .lr = 1e-4, .clip_norm = 0.5},
    };
    static const int worlds[][2] = {{1, 1}, {1, 2}, {1, 3}, {1, 8}, {2, 2}, {2, 4}, {4, 2}};
    int i, w;
    (void)state;
    for (i = 0; i < COUNT(descs); i++)
        for (w = 0; w < COUNT(worlds); w++) {
            tsh_desc desc = {.tp = worlds[w][0]};
            course c = {.optim = descs[i]};
            c.micro = w % 2;
            c.summed = i % 2;
            prove(&c, worlds[w][0] * worlds[w][1], &desc);
        }
}

/* The same with bf16 parameters, whose exact weights are gathered, too; and with gradients and
 * moments in bf16. */
static void half_precision_does_too(void **state) {
    static const tsh_optim_desc descs[] = {
        {.kind = TSH_ADAMW, .lr = 0.01, .weight_decay = 0.1, .clip_norm = 1},
        {.kind = TSH_ADAMW, .lr = 0.01, .grad_dtype = TSH_BF16, .moments_dtype = TSH_BF16},
        {.kind = TSH_SGD, .lr = 1e-4, .momentum = 0.9, .moments_dtype = TSH_BF16},
        {.kind = TSH_ADAM, .lr = 0.01, .round_weights = 1},
    };
    static const int worlds[][2] = {{1, 2}, {1, 3}, {2, 2}, {2, 4}};
    int i, w, again;
    (void)state;
    for (i = 0; i < COUNT(descs); i++)
        for (w = 0; w < COUNT(worlds); w++)
            for (again = 0; again < 2; again++) {
                tsh_desc desc = {.tp = worlds[w][0], .dtype = TSH_BF16};
                course c = {.optim = descs[i], .again = again, .micro = w % 2, .summed = i % 2};
                prove(&c, worlds[w][0] * worlds[w][1], &desc);
            }
}

/* Moments in chunks follow their parameters to a new layout. */
static void a_new_layout_keeps_them(void **state) {
    static const int worlds[][2] = {{2, 2}, {2, 3}, {3, 2}};
    int w;
    (void)state;
    for (w = 0; w < COUNT(worlds); w++) {
        tsh_desc desc = {.tp = worlds[w][0]};
        course c = {.optim = {.kind = TSH_ADAMW, .lr = 0.01, .clip_norm = 1}, .again = 1};
        prove(&c, worlds[w][0] * worlds[w][1], &desc);
    }
}

/* ------------------------------------------------------------ memory and messages */

typedef struct budget {
    int zero;
    size_t held;   /* bytes of moments on rank 0, without zero */
    uint64_t sent; /* bytes over dp of a step */
} budget;

static int costs(tsh_ctx *ctx, void *user) {
    budget *b = (budget *)user;
    const tsh_linear_desc wide = {.in = 256, .out = 256};
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .zero = b->zero};
    tsh_module *net = tsh_root(ctx);
    tsh_optim *optim;
    tsh_comm *dp = tsh_dp(ctx);
    tsh_comm_stats before;
    const int size = dp->size;
    size_t held;
    uint64_t sent = 0;
    int k;
    tsh_add_linear(net, "a", &wide);
    tsh_add_linear(net, "b", &wide);
    tsh_materialize(net);
    optim = tsh_optim_new(net, &adam);
    before = dp->stats;
    CHECK(tsh_backward(ctx, tsh_sum(tsh_forward(net, tsh_ones(ctx, tsh_shape2(2, 256))), TSH_ALL,
                                    0)) == TSH_OK,
          "backward");
    CHECK(tsh_optim_step(optim) == TSH_OK, "step");
    held = tsh_mem_stats(ctx).now[TSH_MEM_OPTIMISER];
    for (k = 0; k < TSH_COLL_KINDS; k++) sent += dp->stats.bytes[k] - before.bytes[k];
    if (b->zero) {
        CHECK(held <= b->held / (size_t)size + 2048, "%d ranks: %lu bytes, whole %lu", size,
              (unsigned long)held, (unsigned long)b->held);
        CHECK(held >= b->held / (size_t)size - 2048, "%lu bytes", (unsigned long)held);
        CHECK(sent <= b->sent + 1024, "%lu bytes sent, not %lu", (unsigned long)sent,
              (unsigned long)b->sent);
        CHECK(dp->stats.calls[TSH_ALLREDUCE] - before.calls[TSH_ALLREDUCE] == 1, "the norm");
        CHECK(dp->stats.calls[TSH_REDUCE_SCATTER] - before.calls[TSH_REDUCE_SCATTER] == 1, "");
        CHECK(dp->stats.calls[TSH_ALLGATHER] - before.calls[TSH_ALLGATHER] == 1, "");
    } else if (dp->rank == 0) {
        b->held = held;
        b->sent = sent;
    }
    return 0;
}

static void it_takes_a_part_of_the_memory_and_no_more_bytes(void **state) {
    static const int sizes[] = {2, 3, 4, 8};
    int i;
    (void)state;
    for (i = 0; i < COUNT(sizes); i++) {
        const tsh_desc desc = {.tp = 1, .bucket_bytes = (size_t)1 << 30};
        budget b = {.zero = 0};
        ranks_run_at(RANKS_EACH, sizes[i], &desc, costs, &b);
        b.zero = 1;
        ranks_run_with(sizes[i], &desc, costs, &b);
    }
}

/* ----------------------------------------------------------------- steps left out */

static int skips(tsh_ctx *ctx, void *user) {
    const int who = *(const int *)user;
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .lr = 0.1, .zero = 1};
    const course c = {.micro = 0};
    tsh_module *net = add_net(ctx, 1);
    tsh_optim *optim = tsh_optim_new(net, &adam);
    hashes before = {.count = 0}, after = {.count = 0}, last = {.count = 0};
    tsh_tensor *loss;
    if (one_step(ctx, &c, optim, 0)) return 1;
    tsh_each_param(net, add_hash, &before);
    loss = net_loss(ctx, 1);
    if (tsh_dp(ctx)->rank == who) loss = tsh_scale(loss, (double)NAN);
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "backward");
    CHECK(tsh_optim_step(optim) == TSH_OK, "a step left out is no error");
    CHECK(tsh_optim_state(optim).skipped == 1 && tsh_optim_state(optim).steps == 1, "counts");
    tsh_each_param(net, add_hash, &after);
    CHECK(memcmp(&before, &after, sizeof before) == 0, "nothing changed");
    tsh_zero_grads(net);
    if (one_step(ctx, &c, optim, 2)) return 1;
    tsh_each_param(net, add_hash, &last);
    CHECK(memcmp(&last, &after, sizeof last) != 0, "it goes on");
    CHECK_OK();
    return 0;
}

static void a_step_is_left_out_on_every_rank(void **state) {
    const tsh_desc desc = {.tp = 2};
    int who;
    (void)state;
    for (who = 0; who < 3; who++) ranks_run_with(6, &desc, skips, &who);
}

static int clips(tsh_ctx *ctx, void *user) {
    double *norm = (double *)user, before, after;
    const tsh_optim_desc sgd = {.zero = *norm > 0};
    tsh_module *net = add_net(ctx, 1);
    (void)tsh_optim_new(net, &sgd);
    CHECK(tsh_backward(ctx, net_loss(ctx, 0)) == TSH_OK, "backward");
    CHECK(tsh_clip_grad_norm(net, 0.25, &before) == TSH_OK, "clip");
    CHECK(tsh_clip_grad_norm(net, 0.25, &after) == TSH_OK, "again");
    CHECK(fabs(after - 0.25) < 1e-5, "%g", after);
    if (sgd.zero) CHECK(before == *norm, "%.17g, not %.17g", before, *norm);
    if (!sgd.zero && tsh_world(ctx)->rank == 0) *norm = before;
    return 0;
}

static int clips_whole(tsh_ctx *ctx, void *user) {
    double none = 0;
    if (clips(ctx, tsh_world(ctx)->rank ? &none : (double *)user)) return 1;
    return 0;
}

static void clipping_is_exact(void **state) {
    const tsh_desc desc = {.tp = 2};
    double norm = 0;
    (void)state;
    ranks_run_with(6, &desc, clips_whole, &norm);
    assert_true(norm > 0);
    ranks_run_with(6, &desc, clips, &norm);
}

/* ----------------------------------------------------------------- drifted replicas */

typedef struct drift {
    int zero, what; /* 0: a parameter, 1: the gradient that one rank steps with */
    int tp, dp;     /* of the rank */
    const char *sentence;
} drift;

static int drifts(tsh_ctx *ctx, void *user) {
    const drift *d = (const drift *)user;
    const tsh_optim_desc sgd = {.kind = TSH_SGD, .lr = 0.0078125, .momentum = 0.5, .zero = d->zero};
    const course c = {.micro = 0};
    const int odd = tsh_tp(ctx)->rank == d->tp && tsh_dp(ctx)->rank == d->dp;
    const tsh_real moved[TINY] = {1, 2, 3};
    tsh_module *net = add_net(ctx, 1), *last = tsh_find(net, "last");
    tsh_optim *optim = tsh_optim_new(net, &sgd);
    if (one_step(ctx, &c, optim, 0)) return 1;
    CHECK(tsh_check_replicas(net), "equal at first");
    if (odd && d->what == 0)
        tsh_write(ctx, tsh_param(last, "bias"), TSH_LOCAL, moved, sizeof moved);
    CHECK(tsh_backward(ctx, net_loss(ctx, 1)) == TSH_OK, "backward");
    if (d->what == 1) { /* for all but the odd one the rate is 0, but moments move */
        tsh_real *values = (tsh_real *)tsh_data(ctx, tsh_grad(tsh_param(last, "bias")));
        CHECK(values, "a gradient");
        if (odd) values[0] += 1;
        tsh_optim_set_lr(optim, 0);
        CHECK(tsh_optim_step(optim) == TSH_OK, "step");
    }
    CHECK(!tsh_check_replicas(net), "one rank drifted");
    CHECK(tsh_last_error(ctx)->code == TSH_ERR_STATE, "the code, on every rank");
    CHECK(strstr(tsh_last_error(ctx)->message, d->sentence),
          "its sentence"); /* or a peer told it */
    return 0;
}

static void drifted_replicas_are_named(void **state) {
    static const struct {
        int ranks, tp;
        drift d;
    } rows[] = {
        {3,
         1,
         {0, 0, 0, 1,
          "tsh_check_replicas: \"last.bias\" differs between the 3 ranks of dp: rank 1 differs "
          "from the others"}},
        {6,
         2,
         {0, 0, 1, 0,
          "tsh_check_replicas: \"last.bias\" differs between the 2 ranks of tp: rank 1 differs "
          "from the others"}},
        {4,
         1,
         {1, 0, 0, 3,
          "tsh_check_replicas: \"last.bias\" differs between the 4 ranks of dp: rank 3 differs "
          "from the others"}},
        {3,
         1,
         {0, 1, 0, 2,
          "tsh_check_replicas: the first moments of \"last.bias\" differ between the 3 ranks of "
          "dp: rank 2 differs from the others"}},
    };
    int i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        const tsh_desc desc = {.tp = rows[i].tp};
        drift d = rows[i].d;
        ranks_run_with(rows[i].ranks, &desc, drifts, &d);
    }
}

/* -------------------------------------------------------------------------- files */

typedef struct filing {
    int zero;
    const char *from, *to; /* loaded first; saved at the end */
    int steps;
    hashes end;
} filing;

/* Every replica has the same batch: files do not depend on how many there are. */
static int files(tsh_ctx *ctx, void *user) {
    filing *f = (filing *)user;
    const tsh_optim_desc adam = {.kind = TSH_ADAMW, .lr = 0.01, .zero = f->zero};
    tsh_module *net = add_net(ctx, 1);
    tsh_optim *optim = tsh_optim_new(net, &adam);
    hashes got = {.count = 0};
    int s;
    if (f->from) CHECK(tsh_load(net, files_path(f->from), optim) == TSH_OK, "load");
    for (s = 0; s < f->steps; s++) {
        tsh_tensor *x = tsh_forward(net, tsh_randn(ctx, tsh_shape2(4, WIDTH)));
        CHECK(tsh_backward(ctx, tsh_sum(tsh_mul(x, x), TSH_ALL, 0)) == TSH_OK, "backward");
        CHECK(tsh_optim_step(optim) == TSH_OK, "step");
        tsh_zero_grads(net);
        (void)tsh_step_end(ctx);
    }
    if (f->to) CHECK(tsh_save(net, files_path(f->to), optim) == TSH_OK, "save");
    tsh_each_param(net, add_hash, &got);
    if (tsh_world(ctx)->rank == 0) f->end = got;
    CHECK_OK();
    return 0;
}

static void file(int ranks, int tp, filing *f) {
    const tsh_desc desc = {.tp = tp};
    ranks_run_with(ranks, &desc, files, f);
}

static void files_are_the_same_bytes(void **state) {
    filing whole = {.to = "whole", .steps = 3}, cut = {.zero = 1, .to = "cut", .steps = 3};
    filing on = {.from = "whole", .to = "whole2", .steps = 2};
    filing cut_on = {.zero = 1, .from = "whole", .to = "cut2", .steps = 2};
    filing back = {.from = "cut", .to = "back", .steps = 2};
    filing copy = {.zero = 1, .from = "cut", .to = "copy", .steps = 0};
    (void)state;
    file(2, 1, &whole); /* sums over 2 and 4 equal replicas are exact */
    file(2, 1, &cut);
    files_expect_same("whole", "cut");
    file(2, 1, &on);
    file(4, 1, &cut_on);
    files_expect_same("whole2", "cut2");
    file(2, 1, &back);
    files_expect_same("whole2", "back");
    file(3, 1, &copy); /* other degrees of both */
    files_expect_same("cut", "copy");
    file(8, 2, &copy);
    files_expect_same("cut", "copy");
    assert_memory_equal(&on.end, &cut_on.end, sizeof on.end);
}

/* With stages of a pipeline too: tp 2 x pp 2 x dp 2. */
static tsh_tensor *stage_input(tsh_ctx *ctx, int k, void *user) {
    (void)user;
    return tsh_scale(tsh_randn(ctx, tsh_shape2(3, WIDTH)), 1 + k + tsh_dp(ctx)->rank);
}

static tsh_tensor *stage_loss(tsh_ctx *ctx, tsh_tensor *y, int k, void *user) {
    (void)ctx, (void)k, (void)user;
    return tsh_sum(tsh_mul(y, y), TSH_ALL, 0);
}

static int staged(tsh_ctx *ctx, void *user) {
    const filing *f = (const filing *)user;
    const tsh_optim_desc adam = {.kind = TSH_ADAMW, .lr = 0.01, .zero = f->zero, .clip_norm = 1};
    const tsh_pipeline_desc desc = {.micro_batches = 3, .input = stage_input, .loss = stage_loss};
    const tsh_linear_desc up = {.in = WIDTH, .out = HIDDEN}, down = {.in = HIDDEN, .out = WIDTH};
    const tsh_layer_norm_desc norm = {.dim = WIDTH};
    static const tsh_plan_rule halves[] = {{.path = "*.*.up", .style = TSH_COLWISE},
                                           {.path = "*.*.down", .style = TSH_ROWWISE}};
    static const char *const names[] = {"0", "1", "2", "3"};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    tsh_pipeline *pipe;
    tsh_optim *optim;
    int i;
    for (i = 0; i < 4; i++) {
        tsh_module *block = tsh_add_module(h, names[i], NULL);
        tsh_add_layer_norm(block, "norm", &norm);
        tsh_add_linear(block, "up", &up);
        tsh_add_linear(block, "down", &down);
    }
    CHECK(tsh_parallelize(tsh_root(ctx), halves, COUNT(halves)) == TSH_OK, "plan");
    CHECK((pipe = tsh_pipeline_new(h, &desc)), "pipeline");
    optim = tsh_optim_new(tsh_root(ctx), &adam);
    if (f->from) CHECK(tsh_load(tsh_root(ctx), files_path(f->from), optim) == TSH_OK, "load");
    for (i = 0; i < f->steps; i++) {
        CHECK(tsh_pipeline_train(pipe, NULL) == TSH_OK, "train");
        CHECK(tsh_optim_step(optim) == TSH_OK, "step");
        tsh_zero_grads(tsh_root(ctx));
        (void)tsh_step_end(ctx);
    }
    CHECK(tsh_save(tsh_root(ctx), files_path(f->to), optim) == TSH_OK, "save");
    CHECK(tsh_check_replicas(tsh_root(ctx)), "replicas");
    CHECK_OK();
    return 0;
}

/* In bf16, a rank has the exact weights of its stage, its shard and its chunk alone. */
static void stages_write_the_same_file(void **state) {
    tsh_desc desc = {.tp = 2, .pp = 2, .bucket_bytes = 300};
    filing whole = {.to = "stages", .steps = 3}, cut = {.zero = 1, .to = "chunks", .steps = 3};
    filing on = {.from = "stages", .to = "on", .steps = 1};
    filing cut_on = {.zero = 1, .from = "chunks", .to = "cut on", .steps = 1};
    (void)state;
    for (int halves = 0; halves < 2; halves++) {
        desc.dtype = halves ? TSH_BF16 : TSH_DTYPE_DEFAULT;
        ranks_run_with(8, &desc, staged, &whole);
        ranks_run_with(8, &desc, staged, &cut);
        files_expect_same("stages", "chunks");
        ranks_run_with(8, &desc, staged, &on);
        ranks_run_with(8, &desc, staged, &cut_on);
        files_expect_same("on", "cut on");
    }
}

/* A file without moments makes them zero again. */
static int forgets(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc sgd = {.kind = TSH_SGD, .lr = 0.1, .momentum = 0.9, .zero = 1};
    const course c = {.micro = 0};
    tsh_module *net = add_net(ctx, 1);
    tsh_optim *optim = tsh_optim_new(net, &sgd);
    hashes first = {.count = 0}, second = {.count = 0};
    (void)user;
    CHECK(tsh_save(net, files_path("new"), optim) == TSH_OK, "save");
    if (one_step(ctx, &c, optim, 0)) return 1;
    tsh_each_param(net, add_hash, &first);
    CHECK(tsh_load(net, files_path("new"), optim) == TSH_OK, "load");
    if (one_step(ctx, &c, optim, 0)) return 1;
    tsh_each_param(net, add_hash, &second);
    CHECK(memcmp(&first, &second, sizeof first) == 0, "the same step once more");
    return 0;
}

static void a_file_without_moments_forgets_them(void **state) {
    const tsh_desc desc = {.tp = 2};
    (void)state;
    ranks_run_with(6, &desc, forgets, NULL);
}

/* ------------------------------------------------------------------- what cannot be */

static int misuses(tsh_ctx *ctx, void *user) {
    const tsh_optim_desc cut = {.zero = 1};
    const tsh_lookup_desc sparse = {.sparse = 1};
    const int what = *(const int *)user;
    static const struct {
        tsh_result code;
        const char *part;
    } want[] = {{TSH_ERR_STATE, "tsh_grad: each rank of dp has a chunk of the gradient of \"up."},
                {TSH_ERR_STATE, "lie in chunks (.zero), so that nothing can be added to them"},
                {TSH_ERR_STATE, "belongs to another optimiser, which has .zero"},
                {TSH_ERR_UNSUPPORTED, "\"table.weight\" is row-sparse, which .zero"}};
    tsh_module *net = add_net(ctx, 1);
    tsh_optim *other = tsh_optim_new(net, NULL);
    (void)tsh_barrier(tsh_world(ctx)); /* nobody fails before the others are here */
    if (what == 3) {
        const tsh_embedding_desc table = {.count = 5, .dim = WIDTH, .lookup = sparse};
        const int32_t ids[2] = {1, 3};
        tsh_module *rows = tsh_add_embedding(net, "table", &table);
        tsh_tensor *x = tsh_tensor_from(ctx, TSH_I32, tsh_shape1(2), tsh_replicated(), ids);
        (void)tsh_optim_new(rows, &cut);
        (void)tsh_backward(ctx, tsh_sum(tsh_forward(rows, x), TSH_ALL, 0));
    } else {
        (void)tsh_optim_new(net, &cut);
        CHECK(tsh_backward(ctx, net_loss(ctx, 0)) == TSH_OK, "backward");
        (void)tsh_barrier(tsh_world(ctx));
        if (what == 0) (void)tsh_grad(tsh_param(net, "up.weight"));
        if (what == 1) (void)tsh_backward(ctx, net_loss(ctx, 0));
        if (what == 2) (void)tsh_optim_step(other);
    }
    CHECK(tsh_last_error(ctx)->code == want[what].code, "%d", what);
    CHECK(strstr(tsh_last_error(ctx)->message, want[what].part), "%d", what);
    return 0;
}

static void what_cannot_be_is_one_error(void **state) {
    const tsh_desc desc = {.tp = 1};
    int what;
    (void)state;
    for (what = 0; what < 4; what++) ranks_run_with(2, &desc, misuses, &what);
}

#define FILING(test) cmocka_unit_test_teardown(test, files_after)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_give_the_bits_of_whole_moments),
        cmocka_unit_test(half_precision_does_too),
        cmocka_unit_test(a_new_layout_keeps_them),
        cmocka_unit_test(it_takes_a_part_of_the_memory_and_no_more_bytes),
        cmocka_unit_test(a_step_is_left_out_on_every_rank),
        cmocka_unit_test(clipping_is_exact),
        cmocka_unit_test(drifted_replicas_are_named),
        FILING(files_are_the_same_bytes),
        FILING(stages_write_the_same_file),
        FILING(a_file_without_moments_forgets_them),
        cmocka_unit_test(what_cannot_be_is_one_error),
    };
    return cmocka_run_group_tests_name("layer/zero", tests, files_begin, files_end);
}
