/* examples/llm/adapter.h: a folder that PEFT 0.21 wrote (golden/lora.py) is read and computes what
 * it does there; one that is written is read again; what tsh_lora cannot compute is refused. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/golden.h"
#include "../support/files.h"
#include "../../examples/llm/adapter.h"

enum { IN = 64, OUT = 12 };

static golden_file golden;

/* As PEFT writes it, with the keys that change nothing. */
static const char config[] =
    "{\"alpha_pattern\": {}, \"base_model_name_or_path\": \"small\", \"bias\": \"none\",\n"
    " \"fan_in_fan_out\": false, \"inference_mode\": true, \"layers_to_transform\": null,\n"
    " \"lora_alpha\": 8, \"lora_dropout\": 0.0, \"modules_to_save\": null, \"peft_type\": "
    "\"LORA\",\n"
    " \"r\": 3, \"rank_pattern\": {}, \"target_modules\": [\"q_proj\", \"c_fc\"],\n"
    " \"task_type\": \"CAUSAL_LM\", \"use_dora\": false, \"use_rslora\": false}\n";

static void write_config(const char *text) {
    FILE *file = fopen(files_path("adapter_config.json"), "w");
    if (!file || fputs(text, file) < 0 || fclose(file) != 0) fail_msg("adapter_config.json");
}

static int put(tsh_ctx *ctx, tsh_module *root, const char *path) {
    const golden_tensor g = golden_get(&golden, "peft", path);
    return tsh_write(ctx, tsh_param(root, path), TSH_GLOBAL, g.data, (size_t)g.count * 4) == TSH_OK;
}

/* Whether the golden model, whose adapters are in the folder, gives the golden output. */
static int computes(tsh_ctx *ctx, tsh_module *root) {
    const golden_tensor in = golden_get(&golden, "base", "x"),
                        want = golden_get(&golden, "peft", "y");
    tsh_tensor *y = tsh_forward(tsh_find(root, "h.0.q_proj"),
                                tsh_from(ctx, in.data, in.shape, TSH_F32));
    double *got;
    y = tsh_forward(tsh_find(root, "head"), tsh_forward(tsh_find(root, "h.0.c_fc"), tsh_relu(y)));
    got = y ? ranks_values(ctx, y) : NULL;
    for (int64_t e = 0; got && e < want.count; e++)
        if (fabs(got[e] - (double)((const float *)want.data)[e]) > 1e-4) {
            free(got);
            return 0;
        }
    free(got);
    return got != NULL;
}

static int reads(tsh_ctx *ctx, void *user) {
    static const char *const params[] = {"h.0.q_proj.weight", "h.0.q_proj.bias", "h.0.c_fc.weight",
                                         "h.0.c_fc.bias",     "head.weight",     "head.bias"};
    const tsh_linear_desc q = {.in = IN, .out = OUT, .style = TSH_COLWISE};
    const tsh_linear_desc c = {.in = OUT, .out = 9, .style = TSH_ROWWISE, .reversed = 1};
    const tsh_linear_desc head = {.in = 9, .out = 4};
    tsh_module *root = tsh_root(ctx), *block;
    static llm_adapter a[8], b[8]; /* of each rank */
    llm_adapter *own = &a[tsh_world(ctx)->rank], *again = &b[tsh_world(ctx)->rank];
    tsh_error why;
    (void)user;
    memset(own, 0, sizeof *own);
    memset(again, 0, sizeof *again);
    block = tsh_add_module(tsh_add_module(root, "h", NULL), "0", NULL);
    (void)tsh_add_linear(block, "q_proj", &q);
    (void)tsh_add_linear(block, "c_fc", &c);
    (void)tsh_add_linear(root, "head", &head);
    for (int i = 0; i < COUNT(params); i++) CHECK(put(ctx, root, params[i]), "%s", params[i]);
    CHECK(llm_adapter_read(own, files_here, &why), "%s", why.message);
    CHECK_TRUE(own->lora.rank == 3 && own->lora.alpha == 8 && own->count == 2);
    CHECK_TRUE(strcmp(own->base, "small") == 0 && strcmp(own->task, "CAUSAL_LM") == 0);
    CHECK_TRUE(llm_adapter_add(root, own) == TSH_OK);
    CHECK_TRUE(llm_adapter_load(root, own, files_here, NULL) == TSH_OK);
    CHECK_TRUE(computes(ctx, root));
    (void)tsh_step_end(ctx);
    CHECK_TRUE(llm_adapter_save(root, own, files_here, NULL) == TSH_OK);
    CHECK_TRUE(llm_adapter_read(again, files_here, &why));
    CHECK_TRUE(memcmp(own, again, sizeof *own) == 0);
    CHECK_TRUE(tsh_lora_free(root, NULL) == TSH_OK && llm_adapter_add(root, again) == TSH_OK);
    CHECK_TRUE(llm_adapter_load(root, again, files_here, NULL) == TSH_OK && computes(ctx, root));
    (void)tsh_step_end(ctx);
    CHECK_TRUE(llm_adapter_save(root, own, "/nonexistent", NULL) != TSH_OK);
    CHECK_TRUE(ranks_says(ctx, TSH_ERR_IO, "/nonexistent/adapter_model.safetensors"));
    return 0;
}

static void a_folder_of_peft_is_read_and_written(void **state) {
    char from[2 * FILES_SIZE], command[4 * FILES_SIZE];
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) {
        write_config(config);
        (void)snprintf(from, sizeof from, "%.*s../golden/peft.safetensors",
                       (int)(strrchr(__FILE__, '/') - __FILE__ + 1), __FILE__);
        (void)snprintf(command, sizeof command, "cp %s %s", from,
                       files_path("adapter_model.safetensors"));
        assert_int_equal(system(command), 0);
        ranks_run(ranks, reads, NULL);
    }
}

/* The config cannot be written, as a folder has its name: all ranks say so. */
static int is_blocked(tsh_ctx *ctx, void *user) {
    static const char path[] = "blocked/adapter_config.json";
    const tsh_linear_desc d = {.in = 8, .out = 6, .style = TSH_COLWISE};
    const llm_adapter own = {.lora = {.rank = 2}};
    (void)user;
    (void)tsh_add_linear(tsh_root(ctx), "q_proj", &d);
    CHECK_TRUE(llm_adapter_add(tsh_root(ctx), &own) == TSH_OK);
    CHECK_TRUE(llm_adapter_save(tsh_root(ctx), &own, files_path("blocked"), NULL) != TSH_OK);
    CHECK(ranks_says(ctx, TSH_ERR_IO, files_path(path)), "%s", tsh_last_error(ctx)->message);
    return 0;
}

static void an_error_of_rank_0_is_one_of_all(void **state) {
    (void)state;
    files_folder("blocked");
    files_folder("blocked/adapter_config.json");
    for (int ranks = 1; ranks <= 3; ranks++) ranks_run(ranks, is_blocked, NULL);
    assert_int_equal(rmdir(files_path("blocked/adapter_config.json")), 0);
    (void)remove(files_path("blocked/adapter_model.safetensors"));
}

static void what_cannot_be_computed_is_refused(void **state) {
    static const char *const cases[][2] = {
        {"[", "is no JSON: line 1, column 2: "},
        {"{\"peft_type\": \"IA3\"}", "peft_type is not \"LORA\""},
        {"[1]", "it is no object"},
        {"{\"peft_type\": \"LORA\", \"r\": 0}", "r is no number from 1 to 1048576"},
        {"{\"peft_type\": \"LORA\", \"r\": \"8\"}", "r is no number from 1 to 1048576"},
        {"{\"peft_type\": \"LORA\", \"r\": 8.5}", "r is no whole number"},
        {"{\"peft_type\": \"LORA\", \"lora_alpha\": -1}", "lora_alpha is no number from 0 to"},
        {"{\"peft_type\": \"LORA\", \"lora_alpha\": \"16\"}", "lora_alpha is no number from 0 to"},
        {"{\"peft_type\": \"LORA\", \"use_rslora\": 1}", "use_rslora is not true or false"},
        {"{\"peft_type\": \"LORA\", \"layers_to_transform\": 0}", "layers_to_transform may change"},
        {"{\"peft_type\": \"LORA\", \"modules_to_save\": [\"h\"]}", "modules_to_save may change"},
        {"{\"peft_type\": \"LORA\", \"some_day\\n\": 0.5}", "some_day? may change"},
        {"{\"peft_type\": \"LORA\", \"r\": 2, \"r\": 3}", "r occurs twice"},
        {"{\"peft_type\": \"LORA\", \"r\": 2, \"use_dora\": true}", "use_dora may change"},
        {"{\"peft_type\": \"LORA\", \"r\": 2, \"bias\": \"all\"}", "bias may change"},
        {"{\"peft_type\": \"LORA\", \"r\": 2, \"rank_pattern\": {\"q\": 4}}",
         "rank_pattern may change"},
        {"{\"peft_type\": \"LORA\", \"r\": 2, \"target_modules\": \".*(q\"}",
         "adapter_config.json: target_modules is a regular expression that cannot be read: miss"},
        {"{\"peft_type\": \"LORA\", \"r\": 2, \"target_modules\": 3}", "is no list of names"},
        {"{\"peft_type\": \"LORA\", \"r\": 2, \"init_lora_weights\": \"pissa\"}",
         "init_lora_weights"},
        {"{\"peft_type\": \"LORA\", \"r\": 2, \"target_modules\": [1]}", "has an entry that is no"},
        {"{\"peft_type\": \"LORA\", \"target_modules\": [\"q_*\"]}", "has an entry that is no"},
        {"{\"peft_type\": \"LORA\", \"target_modules\": []}", "target_modules is no list"},
    };
    static llm_adapter a;
    tsh_error why;
    (void)state;
    for (int k = 0; k < COUNT(cases); k++) {
        write_config(cases[k][0]);
        assert_false(llm_adapter_read(&a, files_here, &why));
        if (!strstr(why.message, cases[k][1])) fail_msg("%s: %s", cases[k][0], why.message);
    }
    write_config("{\"peft_type\": \"LORA\", \"r\": 2, \"target_modules\": \"all-linear\"}");
    assert_true(llm_adapter_read(&a, files_here, &why));
    assert_int_equal(a.count, 0);
    assert_string_equal(a.pattern, "");
    write_config("{\"peft_type\": \"LORA\", \"r\": 2, \"target_modules\": [\"q\", "
                 "\"a_very_long_path.of_a_layer_in_a_model.with_more_than_64_letters.k+\"]}");
    assert_true(llm_adapter_read(&a, files_here, &why));
    assert_int_equal(a.count, 0);
    assert_string_equal(a.pattern, "(?:.*\\.)?(?:q|a_very_long_path\\.of_a_layer_in_a_model\\."
                                   "with_more_than_64_letters\\.k\\+)");
}

/* Targets that name the same layers give them one adapter. */
static int adds_once(tsh_ctx *ctx, void *user) {
    const llm_adapter a = {.lora = {.rank = 2},
                           .targets = {"h.up", "up", "up"},
                           .count = 3};
    const tsh_linear_desc d = {.in = 4, .out = 4};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    (void)user;
    (void)tsh_add_linear(h, "up", &d);
    (void)tsh_add_linear(tsh_root(ctx), "up", &d);
    CHECK_TRUE(llm_adapter_add(tsh_root(ctx), &a) == TSH_OK);
    CHECK_TRUE(tsh_param(h, "up.lora_A.default.weight") != NULL);
    CHECK_TRUE(tsh_param(tsh_root(ctx), "up.lora_A.default.weight") != NULL);
    return 0;
}

static void targets_may_overlap(void **state) {
    (void)state;
    ranks_run(1, adds_once, NULL);
}

static int begin(void **state) {
    golden = golden_open("lora");
    return files_begin(state);
}

static int end(void **state) {
    golden_close(&golden);
    return files_end(state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_folder_of_peft_is_read_and_written, files_after),
        cmocka_unit_test_teardown(an_error_of_rank_0_is_one_of_all, files_after),
        cmocka_unit_test_teardown(what_cannot_be_computed_is_refused, files_after),
        cmocka_unit_test(targets_may_overlap),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
