/* examples/llm/encoder.h: the mean of a text's vectors is that of the text alone, in a batch of
 * unequal lengths and of more texts than the model was made for; others are refused. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../../examples/llm/encoder.h"

enum { TEXTS = 4 };

static llm_encoder texts;

/* The folder of a small BERT, found from this file's own place. */
static const char *folder(char path[512]) {
    const char *slash = strrchr(__FILE__, '/');
    (void)snprintf(path, 512, "%.*s../../examples/llm/tiny/bert",
                   slash ? (int)(slash - __FILE__ + 1) : 0, __FILE__);
    return path;
}

static int means(tsh_ctx *ctx, void *user) {
    static llm_net nets[8]; /* of each rank */
    llm_net *m = &nets[tsh_world(ctx)->rank];
    tsh_tensor *all;
    double *values;
    (void)user;
    CHECK_TRUE(llm_model_load(m, ctx, &texts.config, texts.family, texts.how.folder, 1,
                              texts.longest, TSH_DTYPE_DEFAULT) == TSH_OK);
    tsh_no_grad_begin(ctx);
    all = llm_encoder_means(m, &texts, 0, TEXTS);
    CHECK(all && tsh_size(all, 0) == TEXTS && tsh_size(all, 1) == texts.config.width, "a shape");
    values = ranks_values(ctx, all);
    for (int64_t i = 0; values && i < TEXTS; i++) {
        double *alone = ranks_values(ctx, llm_encoder_means(m, &texts, i, 1)), most = 0;
        for (int64_t k = 0; alone && k < texts.config.width; k++)
            most = fmax(most, fabs(alone[k] - values[i * texts.config.width + k]));
        free(alone);
        /* sums of float32 in another order */
        CHECK(most < 1e-5, "text %d differs by %g", (int)i, most);
    }
    free(values);
    CHECK_TRUE(!llm_encoder_means(m, &texts, 1, TEXTS));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "llm_encoder_means: 4 texts from text 1 on, of 4");
    CHECK_TRUE(!llm_encoder_means(m, &texts, 0, 0));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "0 texts from text 0 on");
    CHECK_TRUE(!llm_encoder_means(m, &texts, -1, 1));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "1 texts from text -1 on");
    CHECK_TRUE(!llm_encoder_means(m, &texts, INT64_MAX, INT64_MAX));
    CHECK_SAYS(TSH_ERR_ARGUMENT, "of 4; at least one");
    tsh_no_grad_end(ctx);
    return 0;
}

static void a_text_has_the_mean_of_its_own_tokens(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) ranks_run(ranks, means, NULL);
}

static void long_texts_are_cut(void **state) {
    static char long_text[20000];
    (void)state;
    memset(long_text, 'a', sizeof long_text - 1);
    for (size_t i = 2; i < sizeof long_text - 1; i += 3) long_text[i] = ' ';
    assert_true(llm_encoder_add(&texts, long_text));
    assert_true(texts.longest <= texts.config.places);
}

static void what_is_missing_is_an_error(void **state) {
    llm_encoder e;
    (void)state;
    assert_false(llm_encoder_open(&e, "/nonexistent"));
    assert_non_null(strstr(e.error, "/nonexistent"));
    llm_encoder_close(&e);
}

static int begin(void **state) {
    static const char *const all[TEXTS] = {"a dog", "", "the cat saw it run home", "a"};
    char path[512];
    int ok = llm_encoder_open(&texts, folder(path));
    (void)state;
    for (int i = 0; i < TEXTS && ok; i++) ok = llm_encoder_add(&texts, all[i]);
    if (!ok) print_message("%s\n", texts.error);
    return !ok;
}

static int end(void **state) {
    (void)state;
    llm_encoder_close(&texts);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_text_has_the_mean_of_its_own_tokens),
        cmocka_unit_test(long_texts_are_cut),
        cmocka_unit_test(what_is_missing_is_an_error),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
