/* Texts that are packed into rows (llm_net.segments, .places) have the losses and gradients of each
 * text alone, in families with rotary positions, learned positions, ALiBi and LongRoPE, and in an
 * encoder. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"
#include "../../examples/llm/model.h"

/* CLASSES: number of classes of a loss: tokens of the vocabulary, or an encoder's features. */
enum { ROWS = 2, LENGTH = 24, VOCABULARY = 61, CLASSES = 48, TEXTS = 3 };

/* Tokens of the texts in each row; 0: no text. The rest of a row is padding. */
static const int64_t texts[ROWS][TEXTS] = {{9, 4, 7}, {17, 7, 0}};

#define SIZES "\"vocab_size\": 61, \"tie_word_embeddings\": false, "
static const char *const configs[] = {
    "{\"model_type\": \"llama\", " SIZES "\"hidden_size\": 48, \"num_hidden_layers\": 2, "
    "\"num_attention_heads\": 6, \"num_key_value_heads\": 3, \"intermediate_size\": 44}",
    "{\"model_type\": \"gpt2\", " SIZES "\"n_embd\": 40, \"n_layer\": 2, \"n_head\": 5, "
    "\"n_positions\": 20}",
    "{\"model_type\": \"bloom\", " SIZES "\"hidden_size\": 48, \"n_layer\": 2, \"n_head\": 6}",
    "{\"model_type\": \"bert\", \"vocab_size\": 61, \"hidden_size\": 48, \"num_hidden_layers\": 2, "
    "\"num_attention_heads\": 6, \"intermediate_size\": 44, \"max_position_embeddings\": 20}",
    "{\"model_type\": \"phi3\", " SIZES "\"hidden_size\": 48, \"num_hidden_layers\": 2, "
    "\"num_attention_heads\": 6, \"intermediate_size\": 44, \"max_position_embeddings\": 24, "
    "\"original_max_position_embeddings\": 20, \"rope_parameters\": {\"rope_type\": \"longrope\", "
    "\"rope_theta\": 10000.0, \"original_max_position_embeddings\": 20, \"short_factor\": "
    "[1.0, 1.3, 1.7, 2.2], \"long_factor\": [1.0, 2.0, 4.0, 8.0]}}",
};

/* Rows of tokens; targets are any classes, and -100 where, in a decoder, no token follows. */
typedef struct rows {
    int32_t ids[ROWS * LENGTH], targets[ROWS * LENGTH], segments[ROWS * LENGTH],
        places[ROWS * LENGTH];
} rows;

static void pack(rows *r, int causal) {
    for (int b = 0; b < ROWS; b++)
        for (int64_t i = 0, t = 0, at = 0; i < LENGTH; i++, at++) {
            const int64_t e = b * LENGTH + i;
            for (; t < TEXTS && at == texts[b][t]; t++) at = 0;
            r->ids[e] = (int32_t)(ranks_mix(9, (uint64_t)e) % VOCABULARY);
            r->segments[e] = t < TEXTS ? (int32_t)t : -1;
            r->places[e] = t < TEXTS ? (int32_t)at : 0;
            r->targets[e] = t < TEXTS && (!causal || at + 1 < texts[b][t])
                                ? (int32_t)(ranks_mix(8, (uint64_t)e) % CLASSES)
                                : -100;
        }
}

/* Makes the model of a config, with the initial values of new layers. */
static int make(tsh_ctx *ctx, llm_net *m, llm_config *c, const llm_family *family) {
    (void)llm_model_make(m, ctx, c, family, ROWS, LENGTH, TSH_DTYPE_DEFAULT);
    m->all = 1;
    return tsh_ok(ctx);
}

/* The sum of the losses of the targets that are not -100. */
static tsh_tensor *loss_of(tsh_ctx *ctx, llm_net *m, const int32_t *ids, const int32_t *targets,
                           int64_t b, int64_t n) {
    const tsh_cross_entropy_desc sum = {.reduction = TSH_REDUCE_SUM};
    tsh_tensor *y = llm_forward(m, tsh_from(ctx, ids, tsh_shape2(b, n), TSH_I32));
    return tsh_cross_entropy(y, tsh_from(ctx, targets, tsh_shape2(b, n), TSH_I32), &sum);
}

typedef struct job {
    llm_config *config;
    const llm_family *family;
} job;

static int packed_rank(tsh_ctx *ctx, void *user) {
    static llm_net nets[RANKS_MAX];
    static rows all[RANKS_MAX];
    const job *j = (const job *)user;
    llm_net *m = &nets[tsh_world(ctx)->rank];
    rows *r = &all[tsh_world(ctx)->rank];
    kept_params *want = (kept_params *)calloc(1, sizeof *want);
    kept_params *got = (kept_params *)calloc(1, sizeof *got);
    tsh_tensor *loss, *alone = NULL;
    double packed, whole;
    int failed;
    CHECK(make(ctx, m, j->config, j->family), "the model");
    pack(r, !j->config->encoder);
    m->segments = tsh_tensor_from(ctx, TSH_I32, tsh_shape2(ROWS, LENGTH), tsh_replicated(),
                                  r->segments);
    m->places = r->places;
    loss = loss_of(ctx, m, r->ids, r->targets, ROWS, LENGTH);
    packed = tsh_item(ctx, loss);
    tsh_backward(ctx, loss);
    CHECK_OK();
    tsh_each_param(m->root, params_keep_gradient, got);
    tsh_zero_grads(m->root);
    tsh_step_end(ctx);
    m->segments = NULL;
    m->places = NULL;
    whole = 0;
    for (int64_t b = 0; b < ROWS; b++)
        for (int64_t t = 0, at = b * LENGTH; t < TEXTS && texts[b][t]; at += texts[b][t++]) {
            m->rows = 1;
            alone = loss_of(ctx, m, r->ids + at, r->targets + at, 1, texts[b][t]);
            whole += tsh_item(ctx, alone);
            tsh_backward(ctx, alone);
            tsh_step_end(ctx);
        }
    CHECK(fabs(packed - whole) <= 1e-6 * fabs(whole), "%s: the loss is %.9g, not %.9g",
          j->family->type, packed, whole);
    tsh_each_param(m->root, params_keep_gradient, want);
    CHECK_OK();
    failed = params_compare(ctx, want, got, 2e-5, -1);
    params_free(want);
    params_free(got);
    free(want);
    free(got);
    tsh_tensor_free(m->segments);
    return failed;
}

static void packed_texts_have_the_losses_of_each_alone(void **state) {
    (void)state;
    for (int k = 0; k < COUNT(configs); k++) {
        static llm_config config;
        const tsh_desc desc = {.seed = 4};
        job j = {&config, NULL};
        FILE *file = fopen(files_path("config.json"), "w");
        if (!file || fputs(configs[k], file) < 0 || fclose(file) != 0) fail_msg("config.json");
        if (!llm_config_read(&config, files_here, &j.family)) fail_msg("%s", config.error);
        for (int ranks = 1; ranks <= 3; ranks++) ranks_run_with(ranks, &desc, packed_rank, &j);
        llm_config_free(&config);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packed_texts_have_the_losses_of_each_alone),
    };
    return cmocka_run_group_tests(tests, files_begin, files_end);
}
