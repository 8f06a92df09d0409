/* LSTM and GRU as layers: PyTorch's values from parameters of PyTorch's names, in files, too; plans
 * and .sharded; dropout in training only; checkpoints; training lowers a loss; what is refused. */
/* build: double */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/golden.h"
#include "../support/files.h"
#include "../support/ranks.h"

#include <float.h>

static tsh_module *add(tsh_ctx *ctx, const char *name, int lstm, const tsh_recurrent_desc *desc) {
    return lstm ? tsh_add_lstm(tsh_root(ctx), name, desc) : tsh_add_gru(tsh_root(ctx), name, desc);
}

/* Compares t with the golden tensor; 0 where they agree. */
static int close_to(tsh_ctx *ctx, const golden_file *g, const char *name, const char *what,
                    tsh_tensor *t) {
    golden_tensor want = golden_get(g, name, what);
    double *got = ranks_values(ctx, t);
    CHECK(got && tsh_numel(t) == want.count, "%s.%s", name, what);
    for (int64_t i = 0; i < want.count; i++) {
        const double y = (double)((const float *)want.data)[i];
        CHECK(fabs(got[i] - y) <= 60 * (double)FLT_EPSILON * (fabs(y) > 1 ? fabs(y) : 1),
              "%s.%s[%ld]: %.9g, not %.9g", name, what, (long)i, got[i], y);
    }
    free(got);
    return 0;
}

typedef struct golden_run {
    golden_file file;
    int lstm, sharded; /* sharded: 1: by the descriptor; 2: by a plan; 3: the batch is */
    int checkpoint;
} golden_run;

/* The gradient that PyTorch gave parameter `path`, "name.weight_ih_l0". */
static int compare_gradients(tsh_ctx *ctx, const golden_run *r, const char *name,
                             tsh_module *layer) {
    tsh_module *child;
    for (int i = 0; (child = tsh_child(layer, i)) != NULL; i++) {
        const char *own = tsh_module_path(child) + strlen(name) + 1;
        char what[64];
        (void)snprintf(what, sizeof what, "d%s", own);
        if (close_to(ctx, &r->file, name, what, tsh_grad(tsh_param(layer, own)))) return 1;
    }
    return 0;
}

/* The case "all" of the golden file: two layers in both directions, batch first. */
static int golden_rank(tsh_ctx *ctx, void *user) {
    const golden_run *r = (const golden_run *)user;
    const char *name = r->lstm ? "lstm_all" : "gru_all";
    const tsh_recurrent_desc desc = {.in = 3,
                                     .hidden = 5,
                                     .layers = 2,
                                     .bidirectional = 1,
                                     .batch_first = 1,
                                     .sharded = r->sharded == 1 ? TSH_YES : TSH_USUAL};
    const tsh_plan_rule plan = {.path = "*.*", .style = TSH_ROWWISE, .segments = 3 + r->lstm};
    tsh_module *layer = add(ctx, name, r->lstm, &desc), *child;
    tsh_tensor *in[3], *y, *h = NULL, *c = NULL, *loss = NULL, *leaf;
    golden_tensor t;
    CHECK_TRUE(layer);
    if (r->sharded == 2) CHECK_TRUE(tsh_parallelize(tsh_root(ctx), &plan, 1) == TSH_OK);
    for (int i = 0; (child = tsh_child(layer, i)) != NULL; i++) {
        const char *own = tsh_module_path(child) + strlen(name) + 1;
        tsh_real values[512];
        t = golden_get(&r->file, name, own);
        for (int64_t e = 0; e < t.count; e++) values[e] = (tsh_real)((const float *)t.data)[e];
        CHECK_TRUE(tsh_write(ctx, tsh_param(layer, own), TSH_GLOBAL, values,
                             (size_t)t.count * sizeof *values) == TSH_OK);
    }
    tsh_checkpoint(layer, r->checkpoint);
    for (int i = 0; i < 2 + r->lstm; i++) {
        t = golden_get(&r->file, name, i == 0 ? "x" : i == 1 ? "h0" : "c0");
        in[i] = tsh_requires_grad(golden_load(ctx, &t), 1);
    }
    leaf = in[0];
    if (r->sharded == 3) in[0] = tsh_redistribute(in[0], tsh_sharded(0));
    if (r->checkpoint)
        y = tsh_forward_n(layer, in, 2 + r->lstm);
    else
        y = r->lstm ? tsh_lstm_forward(layer, in[0], in[1], in[2], &h, &c)
                    : tsh_gru_forward(layer, in[0], in[1], &h);
    y = tsh_redistribute(y, tsh_replicated());
    if (close_to(ctx, &r->file, name, "y", y)) return 1;
    if (h && close_to(ctx, &r->file, name, "h", h)) return 1;
    if (c && close_to(ctx, &r->file, name, "c", c)) return 1;
    if (r->checkpoint) return 0; /* whose gradients are those of y alone */
    for (int i = 0; i < 2 + r->lstm; i++) {
        tsh_tensor *out = i == 0 ? y : tsh_redistribute(i == 1 ? h : c, tsh_replicated());
        tsh_tensor *term;
        t = golden_get(&r->file, name, i == 0 ? "gy" : i == 1 ? "gh" : "gc");
        term = tsh_sum(tsh_mul(out, golden_load(ctx, &t)), TSH_ALL, 0);
        loss = i ? tsh_add(loss, term) : term;
    }
    CHECK_TRUE(tsh_backward(ctx, loss) == TSH_OK);
    if (close_to(ctx, &r->file, name, "dx", tsh_grad(leaf))) return 1;
    if (close_to(ctx, &r->file, name, "dh0", tsh_grad(in[1]))) return 1;
    if (r->lstm && close_to(ctx, &r->file, name, "dc0", tsh_grad(in[2]))) return 1;
    return compare_gradients(ctx, r, name, layer);
}

static void layers_are_pytorchs(void **state) {
    golden_run r = {golden_open("recurrent"), 0, 0, 0};
    (void)state;
    for (int i = 0; i < 10; i++) {
        r.lstm = i % 2;
        r.sharded = i / 2 % 4;
        r.checkpoint = i >= 8;
        for (int k = 0; k < COUNT(ranks_degrees); k++) ranks_run(ranks_degrees[k], golden_rank, &r);
    }
    golden_close(&r.file);
}

/* ----------------------------------------------------------------------- files */

static const tsh_recurrent_desc deep = {.in = 3, .hidden = 6, .layers = 2, .bidirectional = 1};

static int save_rank(tsh_ctx *ctx, void *user) {
    CHECK_TRUE(add(ctx, "rnn", 1, &deep) && add(ctx, "gate", 0, &deep));
    CHECK_TRUE(tsh_save(tsh_root(ctx), (const char *)user, NULL) == TSH_OK);
    return 0;
}

static int load_rank(tsh_ctx *ctx, void *user) {
    const char *const *files = (const char *const *)user;
    tsh_recurrent_desc desc = deep;
    desc.sharded = TSH_YES;
    CHECK_TRUE(add(ctx, "rnn", 1, &desc) && add(ctx, "gate", 0, &desc));
    CHECK_TRUE(tsh_layout_of(tsh_param(tsh_root(ctx), "rnn.weight_hh_l1_reverse")).segments == 4);
    CHECK_TRUE(tsh_load(tsh_root(ctx), files[0], NULL) == TSH_OK);
    CHECK_TRUE(tsh_save(tsh_root(ctx), files[1], NULL) == TSH_OK);
    return 0;
}

static void files_have_pytorchs_names(void **state) {
    static const char *const entries[] = {
        "\"rnn.weight_ih_l0\":{\"dtype\":\"F32\",\"shape\":[24,3]",
        "\"rnn.weight_hh_l0\":{\"dtype\":\"F32\",\"shape\":[24,6]",
        "\"rnn.bias_ih_l0\":{\"dtype\":\"F32\",\"shape\":[24]",
        "\"rnn.bias_hh_l0_reverse\":",
        "\"rnn.weight_ih_l1_reverse\":{\"dtype\":\"F32\",\"shape\":[24,12]",
        "\"gate.weight_hh_l1\":{\"dtype\":\"F32\",\"shape\":[18,6]"};
    const char *files[2] = {files_path("one"), files_path("two")};
    files_bytes bytes;
    (void)state;
    ranks_run(1, save_rank, (void *)(size_t)(const void *)files[0]);
    ranks_run(3, load_rank, files);
    files_expect_same("one", "two");
    if (!FILES_MINE) return; /* under MPI the first process reads, and removes the files then */
    bytes = files_read("one");
    for (int i = 0; i < COUNT(entries) && sizeof(tsh_real) == 4; i++)
        if (!strstr(bytes.at + 8, entries[i])) fail_msg("%s is not in the file", entries[i]);
    files_free(&bytes);
}

/* -------------------------------------------------------------------- training */

/* Remembers the first of three inputs: a loss that falls only if gradients flow through time. */
static int learns(tsh_ctx *ctx, void *user) {
    const int lstm = *(const int *)user;
    const tsh_recurrent_desc desc = {.in = 1, .hidden = 8};
    const tsh_linear_desc head = {.in = 8, .out = 1};
    const tsh_optim_desc adam = {.kind = TSH_ADAM, .lr = 0.03};
    tsh_module *layer = add(ctx, "rnn", lstm, &desc), *out;
    tsh_optim *optim;
    double first = 0, last = 0;
    out = tsh_add_linear(tsh_root(ctx), "head", &head);
    optim = tsh_optim_new(tsh_root(ctx), &adam);
    for (int step = 0; step < 60; step++) {
        tsh_tensor *x = same_leaf(ctx, 1, "3,8,1", 1, 5), *y, *target, *h;
        target = tsh_reshape(tsh_slice(x, 0, 0, 1), tsh_shape2(8, 1));
        (void)(lstm ? tsh_lstm_forward(layer, x, NULL, NULL, &h, NULL)
                    : tsh_gru_forward(layer, x, NULL, &h));
        y = tsh_forward(out, tsh_reshape(h, tsh_shape2(8, 8)));
        y = tsh_mean(tsh_pow_scalar(tsh_sub(y, tsh_detach(target)), 2), TSH_ALL, 0);
        last = tsh_item(ctx, y);
        if (!step) first = last;
        CHECK_TRUE(tsh_backward(ctx, y) == TSH_OK && tsh_optim_step(optim) == TSH_OK);
        tsh_zero_grads(tsh_root(ctx));
        (void)tsh_step_end(ctx);
        tsh_tensor_free(x);
    }
    CHECK(last < 0.3 * first, "%g to %g", first, last);
    return 0;
}

static void losses_fall(void **state) {
    (void)state;
    for (int lstm = 0; lstm < 2; lstm++) {
        ranks_run(1, learns, &lstm);
        ranks_run(2, learns, &lstm);
    }
}

static int modes(tsh_ctx *ctx, void *user) {
    const tsh_recurrent_desc desc = {.in = 3, .hidden = 6, .layers = 2, .dropout = 0.5};
    tsh_module *layer = add(ctx, "rnn", 1, &desc);
    double *got[4];
    (void)user;
    for (int i = 0; i < 4; i++) {
        tsh_train(layer, i < 2);
        got[i] = ranks_values(ctx, tsh_forward(layer, same_leaf(ctx, 1, "3,2,3", 1, 1)));
    }
    CHECK_OK();
    CHECK_TRUE(memcmp(got[0], got[1], 36 * sizeof(double)) != 0);
    CHECK_TRUE(memcmp(got[1], got[2], 36 * sizeof(double)) != 0);
    CHECK_TRUE(memcmp(got[2], got[3], 36 * sizeof(double)) == 0);
    for (int i = 0; i < 4; i++) free(got[i]);
    return 0;
}

static void dropout_acts_in_training(void **state) {
    (void)state;
    ranks_run(1, modes, NULL);
}

static int refusals(tsh_ctx *ctx, void *user) {
    const tsh_recurrent_desc none = {.in = 3}, fits = {.in = 3, .hidden = 6};
    tsh_tensor *x = same_leaf(ctx, 1, "3,2,3", 1, 1), *h, *in[4] = {x, NULL, NULL, NULL};
    tsh_module *lstm, *gru;
    (void)user;
    CHECK_TRUE(!tsh_add_lstm(tsh_root(ctx), "n", &none));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_add_lstm: \"n\" has 3 features, 0 units and 0 layers");
    CHECK_TRUE(!tsh_add_gru(tsh_root(ctx), "n", NULL));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_add_gru: there is no description");
    lstm = add(ctx, "n", 1, &fits);
    gru = add(ctx, "g", 0, &fits);
    CHECK_TRUE(lstm && gru && tsh_forward_n(lstm, in, 3) && tsh_forward_n(gru, in, 2));
    CHECK_TRUE(!tsh_forward_n(gru, in, 3));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "g: tsh_forward: takes x and h0, not 3 inputs");
    CHECK_TRUE(!tsh_lstm_forward(gru, x, NULL, NULL, &h, NULL) && !h);
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_lstm_forward: \"g\" is of kind \"gru\"");
    CHECK_TRUE(!tsh_lstm_forward(NULL, x, NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "tsh_lstm_forward: the module is NULL");
    CHECK_TRUE(!tsh_lstm_forward(lstm, same_leaf(ctx, 1, "3,2,4", 1, 1), NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_SHAPE, "n: tsh_lstm: x (3, 2, 4) R, weight_ih (24, 3) R");
    tsh_checkpoint(lstm, 1);
    CHECK_TRUE(!tsh_lstm_forward(lstm, x, NULL, NULL, &h, NULL));
    CHECK_SAYS(TSH_ERR_STATE, "\"n\" is checkpointed, and keeps its first output only");
    return 0;
}

static void mistakes_are_named(void **state) {
    (void)state;
    ranks_run(1, refusals, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_are_pytorchs),
        cmocka_unit_test_teardown(files_have_pytorchs_names, files_after),
        cmocka_unit_test(losses_fall),
        cmocka_unit_test(dropout_acts_in_training),
        cmocka_unit_test(mistakes_are_named),
    };
    return cmocka_run_group_tests_name("layer/recurrent_layers", tests, files_begin, files_end);
}
