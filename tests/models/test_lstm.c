/* A language model over characters: embedding, two layers of LSTM, linear, cross-entropy. It trains
 * as in PyTorch at 1, 2 and 3 ranks: the rows of the embedding are sharded, and the units of the
 * LSTM, which are the columns of the last layer, a row-parallel one. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "models.h"

enum { T = 8, B = 4, CHARS = 13, WIDTH = 6, UNITS = 7, LAYERS = 2 };

static const tsh_plan_rule plan[] = {{.path = "embed", .style = TSH_ROWWISE},
                                     {.path = "lstm.*", .style = TSH_ROWWISE, .segments = 4},
                                     {.path = "head", .style = TSH_ROWWISE}};

static void build(tsh_module *root) {
    tsh_add_embedding(root, "embed", &(tsh_embedding_desc){.count = CHARS, .dim = WIDTH});
    tsh_add_lstm(root, "lstm",
                 &(tsh_recurrent_desc){.in = WIDTH, .hidden = UNITS, .layers = LAYERS});
    tsh_add_linear(root, "head", &(tsh_linear_desc){.in = UNITS, .out = CHARS});
}

/* A character follows from the one before it, but for one bit: noise. */
static tsh_tensor *loss(tsh_module *root, int step) {
    tsh_ctx *ctx = tsh_module_ctx(root);
    tsh_tensor *first = models_below(ctx, CHARS, "first", step, tsh_shape1(B));
    tsh_tensor *noise = models_below(ctx, 2, "noise", step, tsh_shape2(T, B));
    const int64_t *bit = (const int64_t *)tsh_data(ctx, noise);
    int64_t ids[(T + 1) * B];
    memcpy(ids, tsh_data(ctx, first), B * sizeof *ids);
    for (int i = 0; i < T * B; i++) ids[B + i] = (3 * ids[i] + bit[i]) % CHARS;
    return tsh_cross_entropy(tsh_forward(root, tsh_from(ctx, ids, tsh_shape2(T, B), TSH_I64)),
                             tsh_from(ctx, ids + B, tsh_shape2(T, B), TSH_I64), NULL);
}

static const tsh_optim_desc optim = {.kind = TSH_ADAMW, .lr = 1e-2, .weight_decay = 0.01};

static void an_lstm_trains_as_in_pytorch(void **state) {
    model m = {"lstm", build, loss, plan, COUNT(plan), optim};
    (void)state;
    models_prove(&m, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(an_lstm_trains_as_in_pytorch)};
    return cmocka_run_group_tests_name("lstm", tests, NULL, NULL);
}
