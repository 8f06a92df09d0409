/* For test_added.py: ADDED, the optimiser that signum.diff or lars.diff adds: its values
 * against a loop in double, and the same bits at every degree of tp and dp, with .zero, and when
 * training goes on at another degree. */
#include "check.h"

enum { ROWS = 7, COLUMNS = 10, N = ROWS * COLUMNS, STEPS = 3 };
#define RATE     0.02
#define DECAY    0.1
#define MOMENTUM 0.9
#define FILE_NAME "optimiser.safetensors"

static double begin[N], expected[N]; /* the weight before and after STEPS steps */
static tsh_real first[N];            /* what the first degree tried has computed */

typedef struct setting {
    int ranks, tp, zero, loads; /* loads 1: reads the state after one step from FILE_NAME */
    tsh_dtype dtype;
} setting;

static double gradient(int step, int i) {
    return sin(1.7 * i + 0.3 * step * i + step);
}

static double norm(const double *x) {
    double sum = 0;
    int i;
    for (i = 0; i < N; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

static void expect(int lars) {
    double m[N] = {0}, g[N];
    int i, step;
    memcpy(expected, begin, sizeof begin);
    for (step = 1; step <= STEPS; step++) {
        const double size = norm(expected);
        double rate;
        for (i = 0; i < N; i++) g[i] = gradient(step, i);
        rate = RATE * 0.001 * size / (norm(g) + DECAY * size);
        for (i = 0; i < N; i++) {
            const double by = lars ? rate * (g[i] + DECAY * expected[i]) : (1 - MOMENTUM) * g[i];
            m[i] = MOMENTUM * m[i] + by;
            expected[i] = lars ? expected[i] - m[i]
                               : expected[i] * (1 - RATE * DECAY) -
                                     RATE * (m[i] > 0 ? 1 : m[i] < 0 ? -1 : 0);
        }
    }
}

/* Gives the weight a gradient that is the same at every degree. */
static tsh_result step(tsh_ctx *ctx, tsh_tensor *weight, tsh_optim *optim, int number) {
    tsh_tensor *c = tsh_zeros(ctx, tsh_shape2(ROWS, COLUMNS));
    tsh_real *values = (tsh_real *)tsh_data(ctx, c);
    int i;
    for (i = 0; values && i < N; i++) values[i] = (tsh_real)gradient(number, i);
    c = tsh_redistribute(c, tsh_layout_of(weight));
    c = tsh_sum(tsh_mul(tsh_cast(weight, TSH_REAL), c), TSH_ALL, 0);
    (void)tsh_backward(ctx, tsh_redistribute(c, tsh_replicated()));
    (void)tsh_optim_step(optim);
    tsh_zero_grads(tsh_root(ctx));
    tsh_step_end(ctx);
    return tsh_last_error(ctx)->code;
}

static int train(tsh_ctx *ctx, void *user) {
    const setting *s = (const setting *)user;
    const tsh_plan_rule plan = {.path = "fc", .style = TSH_COLWISE};
    const tsh_linear_desc linear = {.in = COLUMNS, .out = ROWS, .bias = TSH_NO};
    const tsh_optim_desc desc = {.kind = ADDED, .lr = RATE, .beta1 = MOMENTUM,
                                 .momentum = MOMENTUM, .weight_decay = DECAY, .zero = s->zero};
    tsh_module *fc = tsh_add_linear(tsh_root(ctx), "fc", &linear);
    tsh_tensor *weight = tsh_param(fc, "weight");
    tsh_real values[N];
    tsh_optim *optim;
    int i, number = 1;
    for (i = 0; i < N; i++) values[i] = (tsh_real)begin[i];
    CHECK(tsh_write(ctx, weight, TSH_GLOBAL, values, sizeof values) == TSH_OK);
    CHECK(tsh_to(tsh_root(ctx), s->dtype) == TSH_OK);
    CHECK(tsh_parallelize(tsh_root(ctx), &plan, 1) == TSH_OK);
    optim = tsh_optim_new(tsh_root(ctx), &desc);
    if (s->loads) {
        CHECK(tsh_load(tsh_root(ctx), FILE_NAME, optim) == TSH_OK);
        number = 2;
    }
    for (; number <= STEPS; number++) {
        CHECK(step(ctx, weight, optim, number) == TSH_OK);
        if (number == 1) CHECK(tsh_save(tsh_root(ctx), FILE_NAME, optim) == TSH_OK);
    }
    CHECK(tsh_read(ctx, tsh_cast(weight, TSH_REAL), TSH_GLOBAL, values, sizeof values) == TSH_OK);
    if (s->ranks == 1 && !s->loads) memcpy(first, values, sizeof first);
    CHECK(memcmp(values, first, sizeof first) == 0);
    for (i = 0; i < N; i++)
        CHECK(fabs((double)values[i] - expected[i]) <= (s->dtype == TSH_REAL ? 1e-12 : 2e-2));
    return 0;
}

int main(void) {
    static const setting settings[] = {
        {1, 1, 0, 0, TSH_F64}, {1, 1, 0, 1, TSH_F64},  {2, 2, 0, 0, TSH_F64}, {2, 1, 0, 1, TSH_F64},
        {2, 1, 1, 0, TSH_F64}, {4, 2, 1, 0, TSH_F64},  {4, 2, 1, 1, TSH_F64}, {8, 4, 1, 0, TSH_F64},
        {3, 3, 0, 1, TSH_F64}, {1, 1, 0, 0, TSH_BF16}, {4, 2, 1, 1, TSH_BF16}};
    size_t at;
    int i;
    for (i = 0; i < N; i++) begin[i] = 0.1 * cos(0.7 * i);
    expect(strcmp(tshi_optims[ADDED].name, "lars") == 0);
    for (at = 0; at < sizeof settings / sizeof settings[0]; at++) {
        const setting *s = &settings[at];
        const tsh_desc desc = {.tp = s->tp, .logger.log = tsh_log_stderr};
        if (tsh_threads_run(s->ranks, &desc, train, (void *)(size_t)s) == 0) continue;
        (void)fprintf(stderr, "setting %d\n", (int)at);
        return 1;
    }
    return 0;
}
