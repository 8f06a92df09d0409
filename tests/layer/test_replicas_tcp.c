/* Data parallelism over TCP, every rank a process: the same bits as on threads, whatever the
 * buckets hold and whenever they travel. */
#include "../../backends/tshard_threads.h"
#include "../../backends/tshard_uv.h"

#include "../support/processes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <cmocka.h>

enum { WIDTH = 37, LAYERS = 4, STEPS = 5 };

/* How a run is cut and sent. */
typedef struct course {
    int ranks;
    tsh_desc desc;
} course;

static tsh_optim *make_net(tsh_ctx *ctx) {
    static const tsh_plan_rule plan[] = {{.path = "*.up", .style = TSH_COLWISE},
                                         {.path = "*.down", .style = TSH_ROWWISE}};
    const tsh_linear_desc up = {.in = WIDTH, .out = 2 * WIDTH},
                          down = {.in = 2 * WIDTH, .out = WIDTH};
    const tsh_layer_norm_desc norm = {.dim = WIDTH};
    const tsh_optim_desc adam = {.kind = TSH_ADAMW, .lr = 1e-2, .clip_norm = 1};
    char name[24];
    int i;
    for (i = 0; i < LAYERS; i++) {
        tsh_module *layer;
        (void)snprintf(name, sizeof name, "%d", i);
        layer = tsh_add_module(tsh_root(ctx), name, NULL);
        tsh_add_layer_norm(layer, "norm", &norm);
        tsh_add_linear(layer, "up", &up);
        tsh_add_linear(layer, "down", &down);
    }
    tsh_parallelize(tsh_root(ctx), plan, 2);
    tsh_materialize(tsh_root(ctx));
    return tsh_optim_new(tsh_root(ctx), &adam);
}

static void add_hash(const char *path, tsh_tensor *param, void *user) {
    uint64_t *sum = (uint64_t *)user;
    (void)path;
    *sum = *sum * 31 + tsh_hash(tsh_ctx_of(param), param);
}

static void train_rank(job *j) {
    const course *c = (const course *)j->user;
    tsh_desc desc = c->desc;
    tsh_ctx *ctx;
    tsh_optim *adam;
    int step;
    desc.comm = j->comm;
    memset(&j->comm, 0, sizeof j->comm); /* the ctx closes it */
    CHECK(tsh_open(&desc, &ctx) == TSH_OK);
    adam = make_net(ctx);
    for (step = 0; step < STEPS && tsh_ok(ctx); step++) {
        const double own = 1 + tsh_dp(ctx)->rank + step;
        const tsh_backward_desc sum = {.summed = 1, .weight = 4 * own};
        tsh_tensor *x = tsh_randn(ctx, tsh_shape2(4, WIDTH));
        x = tsh_scale(tsh_forward(tsh_root(ctx), tsh_scale(x, own)), own);
        x = tsh_sum(tsh_mul(x, x), TSH_ALL, 0);
        (void)tsh_backward_with(ctx, x, step % 2 ? &sum : NULL);
        (void)tsh_optim_step(adam);
        tsh_zero_grads(tsh_root(ctx));
        (void)tsh_step_end(ctx);
    }
    CHECK(tsh_ok(ctx));
    CHECK(tsh_optim_state(adam).steps == STEPS);
    tsh_each_param(tsh_root(ctx), add_hash, &j->hash);
    CHECK(tsh_ok(ctx));
    tsh_close(ctx);
}

/* The hash of all parameters after the course, equal on every rank. */
static uint64_t run_course(const course *c, world_way way) {
    world_desc desc;
    world w;
    const char *why;
    uint64_t hash;
    int r;
    memset(&desc, 0, sizeof desc);
    desc.way = way;
    desc.ranks = c->ranks;
    desc.fn = train_rank;
    desc.user = c;
    world_start(&w, &desc);
    why = world_end(&w);
    if (why) fail_msg("%s", why);
    hash = w.jobs[0].hash;
    for (r = 1; r < c->ranks; r++) assert_true(w.jobs[r].hash == hash);
    world_free(&w);
    return hash;
}

static void tcp_gives_the_same_bits_as_threads(void **state) {
    static const int worlds[][2] = {{2, 1}, {3, 1}, {4, 2}, {4, 1}}; /* ranks, tp */
    static const size_t bytes[] = {0, 1, 4000};
    int i, b;
    (void)state;
    for (i = 0; i < 4; i++) {
        course c;
        uint64_t hash;
        memset(&c, 0, sizeof c);
        c.ranks = worlds[i][0];
        c.desc.tp = worlds[i][1];
        hash = run_course(&c, WORLD_THREADS);
        for (b = 0; b < 3; b++)
            for (c.desc.no_overlap = 0; c.desc.no_overlap < 2; c.desc.no_overlap++) {
                c.desc.bucket_bytes = bytes[b];
                assert_true(run_course(&c, WORLD_TCP) == hash);
            }
    }
}

/* ------------------------------------------------------------------ other models */

/* What the last rank does otherwise, and what all are told of it. */
typedef struct oddity {
    const char *says;
    int ranks, tp, seed, wider, planless;
} oddity;

static void differ(job *j) {
    static const tsh_plan_rule plan[] = {{.path = "up", .style = TSH_COLWISE},
                                         {.path = "down", .style = TSH_ROWWISE}};
    const oddity *o = (const oddity *)j->user;
    const int odd = j->rank == j->ranks - 1, hidden = 64 + (odd && o->wider);
    const tsh_linear_desc up = {.in = WIDTH, .out = hidden}, down = {.in = hidden, .out = WIDTH};
    const tsh_optim_desc adam = {.kind = TSH_ADAM};
    tsh_desc desc = {.tp = o->tp, .seed = odd && o->seed ? 5 : 4};
    const tsh_error *error;
    tsh_optim *optim;
    tsh_tensor *x;
    tsh_ctx *ctx;
    desc.comm = j->comm;
    memset(&j->comm, 0, sizeof j->comm); /* the ctx closes it */
    CHECK(tsh_open(&desc, &ctx) == TSH_OK);
    (void)tsh_add_linear(tsh_root(ctx), "up", &up);
    (void)tsh_add_linear(tsh_root(ctx), "down", &down);
    if (!odd || !o->planless) (void)tsh_parallelize(tsh_root(ctx), plan, 2);
    optim = tsh_optim_new(tsh_root(ctx), &adam);
    x = tsh_forward(tsh_root(ctx), tsh_ones(ctx, tsh_shape2(2, WIDTH)));
    (void)tsh_backward(ctx, tsh_mean(tsh_mul(x, x), TSH_ALL, 0));
    (void)tsh_optim_step(optim);
    error = tsh_last_error(ctx);
    CHECK(!tsh_ok(ctx) && error->code == TSH_ERR_MISMATCH);
    CHECK(error->rank == j->ranks - 1);
    CHECK(strstr(error->message, "built different models: rank ") != NULL);
    CHECK(strstr(error->message, o->says) != NULL);
    tsh_close(ctx);
}

/* One error on every process, whatever differs and along whichever axis. */
static void a_process_with_another_model_is_named(void **state) {
    static const int worlds[][2] = {{2, 2}, {2, 1}, {4, 4}, {4, 2}, {4, 1}}; /* ranks, tp */
    const oddity all[] = {{.says = "has the seed 5 where rank ", .seed = 1},
                          {.says = "\"up\" linear: weight f32 (65, 37) S(0)", .wider = 1},
                          {.says = "\"up\" linear: weight f32 (64, 37) R", .planless = 1}};
    size_t i;
    (void)state;
    for (i = 0; i < 5 * 3; i++) {
        oddity o = all[i % 3];
        world_desc desc;
        const char *why;
        world w;
        o.ranks = worlds[i / 3][0];
        o.tp = worlds[i / 3][1];
        memset(&desc, 0, sizeof desc);
        desc.way = WORLD_TCP;
        desc.ranks = o.ranks;
        desc.fn = differ;
        desc.user = &o;
        world_start(&w, &desc);
        why = world_end(&w);
        if (why) fail_msg("%s", why);
        world_free(&w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(tcp_gives_the_same_bits_as_threads),
                                       cmocka_unit_test(a_process_with_another_model_is_named)};
    return cmocka_run_group_tests_name("layer/replicas_tcp", tests, NULL, NULL);
}
