/* examples/llm: llm_loss and llm_accuracy of small models of every family, whose heads have biases,
 * factors and soft caps, against the cross-entropy and the largest of their logits, at 1 to 3
 * ranks: the same bits of the loss, the same gradients. Their vocabulary of 61 does not divide. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"
#include "../../examples/llm/model.h"

enum { ROWS = 2, LENGTH = 8, CLASSES = 61, MOST = 256 };

static const char *const names[] = {
    "bloom",   "falcon", "gemma", "gemma2", "gemma3", "gpt2",  "llama", "gpt_neox", "granite",
    "mistral", "olmo2",  "opt",   "phi",    "phi3",   "qwen2", "qwen3", "smollm3",  "starcoder2"};

static const int32_t ids[ROWS * LENGTH] = {3, 50, 17, 17, 9, 60, 0, 31, 5, 4, 3, 2, 44, 59, 1, 8};
static const int32_t next[ROWS * LENGTH] = {50, 17, 17, 9,  60, 0, 31,   -100,
                                            4,  3,  2,  44, 59, 1, -100, 12};

static tsh_tensor *targets_of(tsh_ctx *ctx) {
    return tsh_from(ctx, next, tsh_shape2(ROWS, LENGTH), TSH_I32);
}

/* How many targets have the largest logit of their token. */
static int count(tsh_ctx *ctx, tsh_tensor *logits, int64_t *hits) {
    double *at = ranks_values(ctx, logits);
    CHECK_TRUE(at != NULL);
    *hits = 0;
    for (int i = 0; i < ROWS * LENGTH; i++) {
        int best = 0;
        for (int c = 1; c < CLASSES; c++)
            if (at[i * CLASSES + c] > at[i * CLASSES + best]) best = c;
        *hits += best == next[i];
    }
    free(at);
    return 0;
}

/* The gradients of all parameters. */
typedef struct gradients {
    tsh_ctx *ctx;
    int count;
    char path[MOST][64];
    int64_t size[MOST];
    double *values[MOST]; /* NULL: there is none */
} gradients;

static void collect(const char *path, tsh_tensor *param, void *user) {
    gradients *g = (gradients *)user;
    if (g->count == MOST) return;
    (void)snprintf(g->path[g->count], sizeof g->path[0], "%s", path);
    g->size[g->count] = tsh_numel(param);
    g->values[g->count++] = tsh_grad(param) ? ranks_values(g->ctx, tsh_grad(param)) : NULL;
}

/* Runs forward and backward, with the head on all tokens, or in llm_loss. */
static int step(llm_net *m, int chunks, double *loss, int64_t *hits, gradients *g) {
    tsh_ctx *ctx = m->ctx;
    const tsh_cross_entropy_desc sum = {.reduction = TSH_REDUCE_SUM};
    tsh_tensor *y;
    memset(m->past, 0, (size_t)m->rows * sizeof *m->past);
    m->all = !chunks;
    m->vectors = chunks;
    tsh_zero_grads(m->root);
    y = llm_logits(m, ids, LENGTH, NULL);
    CHECK(y && tsh_size(y, 1) == LENGTH, "the forward");
    if (chunks)
        *hits = llm_accuracy(m, y, targets_of(ctx));
    else if (count(ctx, y, hits))
        return 1;
    y = chunks ? llm_loss(m, y, targets_of(ctx)) : tsh_cross_entropy(y, targets_of(ctx), &sum);
    CHECK(y, "the loss");
    *loss = tsh_item(ctx, y);
    CHECK(tsh_backward(ctx, y) == TSH_OK, "backward");
    g->ctx = ctx;
    tsh_each_param(m->root, collect, g);
    CHECK_TRUE(g->count > 0 && g->count < MOST);
    CHECK(tsh_step_end(ctx) == TSH_OK, "the end");
    return 0;
}

static int same(tsh_ctx *ctx, int64_t n, const double *got, const double *want) {
    double most = 0;
    CHECK_TRUE(!got == !want);
    for (int64_t e = 0; e < n && got; e++) most = fabs(want[e]) > most ? fabs(want[e]) : most;
    for (int64_t e = 0; e < n && got; e++) /* the order of sums differs */
        CHECK(fabs(got[e] - want[e]) <= 3e-5 * most, "element %d: %g, not %g", (int)e, got[e],
              want[e]);
    return 0;
}

static int agrees(tsh_ctx *ctx, void *user) {
    const char *folder = (const char *)user;
    llm_net *m = (llm_net *)calloc(1, sizeof *m);
    llm_config *c = (llm_config *)calloc(1, sizeof *c);
    const llm_family *family;
    gradients *g = (gradients *)calloc(2, sizeof *g);
    double loss[2];
    int64_t hits[2] = {0, 0};
    CHECK_TRUE(m && c && g);
    CHECK(llm_config_read(c, folder, &family), "%s: %s", folder, c->error);
    CHECK(llm_model_load(m, ctx, c, family, folder, ROWS, LENGTH, TSH_DTYPE_DEFAULT) == TSH_OK,
          "%s", folder);
    tsh_cache_free(m->cache); /* it is for generating */
    m->cache = NULL;
    CHECK_TRUE(!llm_loss(m, tsh_ones(ctx, tsh_shape1(1)), tsh_ones(ctx, tsh_shape0())));
    CHECK_SAYS(TSH_ERR_STATE, "no forward of a model with a head");
    for (int k = 0; k < 2; k++)
        if (step(m, k, &loss[k], &hits[k], &g[k])) return 1;
    CHECK(memcmp(&loss[0], &loss[1], sizeof loss[0]) == 0, "%s: %.9g, not %.9g", folder, loss[1],
          loss[0]);
    CHECK(hits[0] == hits[1], "%s: %d targets, not %d", folder, (int)hits[1], (int)hits[0]);
    for (int i = 0; i < g->count; i++) {
        CHECK(!same(ctx, g->size[i], g[1].values[i], g[0].values[i]), "%s: %s", folder, g->path[i]);
        free(g[0].values[i]);
        free(g[1].values[i]);
    }
    free(g);
    llm_config_free(c);
    free(c);
    free(m);
    CHECK_OK();
    return 0;
}

static void a_head_in_chunks_gives_the_loss_of_all_logits(void **state) {
    char command[4 * FILES_SIZE], folder[2 * FILES_SIZE];
    (void)state;
    for (int i = 0; i < COUNT(names); i++) {
        (void)snprintf(folder, sizeof folder, "%s/%s", files_here, names[i]);
        (void)snprintf(command, sizeof command,
                       "python3 -c 'import sys; sys.path.insert(0, \"%.*s\"); import models; "
                       "models.write(\"%s\", models.load(\"%s\"))'",
                       (int)(strrchr(__FILE__, '/') - __FILE__), __FILE__, folder, names[i]);
        assert_int_equal(system(command), 0);
        for (int ranks = 1; ranks <= 3; ranks++) ranks_run(ranks, agrees, folder);
        (void)snprintf(command, sizeof command, "rm -r %s", folder);
        assert_int_equal(system(command), 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_head_in_chunks_gives_the_loss_of_all_logits),
    };
    return cmocka_run_group_tests(tests, files_begin, files_end);
}
