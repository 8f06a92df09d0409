/* tsh_save_with of models under the names of other programs' files, and as several files with an
 * index: the same bytes at every degree, which tsh_load_with reads with the same options; and what
 * cannot be saved, which leaves nothing behind. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"
#include "../support/folder_model.h"

/* ------------------------------------------------------------------------ the model */

/* The model, whose head has the weight of the embedding, and a layer "out". */
static void add_tied_model(tsh_ctx *ctx) {
    const tsh_linear_desc out = {.in = WIDTH, .out = WORDS, .bias = TSH_NO, .style = TSH_COLWISE};
    tsh_module *root = tsh_root(ctx);
    add_model(ctx);
    tsh_tie(tsh_find(root, "head"), "weight", tsh_param(root, "embed.weight"));
    tsh_add_linear(root, "out", &out);
}

/* Callback of tsh_each_param: writes a parameter's numbers. */
static void fill(const char *path, tsh_tensor *param, void *user) {
    double values[WORDS * HIDDEN];
    float wanted[WORDS * HIDDEN];
    int64_t e;
    walk *w = (walk *)user;
    tsh_result result;
    for (e = 0; e < tsh_numel(param); e++) values[e] = number(path, e);
    for (e = 0; e < tsh_numel(param); e++) wanted[e] = (float)values[e];
    if (tsh_dtype_of(param) == TSH_F64)
        result = tsh_write(tsh_ctx_of(param), param, TSH_GLOBAL, values, (size_t)e * 8);
    else
        result = tsh_write(tsh_ctx_of(param), param, TSH_GLOBAL, wanted, (size_t)e * 4);
    w->wrong += result != TSH_OK;
}

typedef struct job {
    const char *path;
    tsh_file_desc desc;
    tsh_result code; /* the error of saving, and a part of its sentence */
    const char *part;
} job;

static int saves(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    walk w;
    memset(&w, 0, sizeof w);
    add_tied_model(ctx);
    tsh_each_param(tsh_root(ctx), fill, &w);
    CHECK(!w.wrong, "%d are not written", w.wrong);
    (void)tsh_save_with(tsh_root(ctx), j->path, NULL, &j->desc);
    if (j->part) {
        CHECK_SAYS(j->code, j->part);
        return 0;
    }
    CHECK_OK();
    return 0;
}

static int loads(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    walk w;
    memset(&w, 0, sizeof w);
    add_tied_model(ctx);
    CHECK(tsh_load_with(tsh_root(ctx), j->path, NULL, &j->desc) == TSH_OK, "loaded");
    tsh_each_param(tsh_root(ctx), compare, &w);
    CHECK(!w.wrong, "%d wrong, %s", w.wrong, w.path);
    return 0;
}

/* ------------------------------------------------------------------------ names */

static const tsh_rename renamed[] = {{"decoder.**", "net.**"},
                                     {"lm.*", "net.out.*"},
                                     {"**.layer_*.**", "**.h.*.**"},
                                     {"**.mlp.dense_in.*", "**.up.*"},
                                     {"**.mlp.dense_out.*", "**.down.*"},
                                     {NULL, NULL}};

/* Names in the files, sorted, with the bytes of their values. */
static const struct {
    const char *name;
    int bytes;
} stored[] = {
    {"decoder.embed.weight", WORDS * WIDTH * 4},
    {"decoder.layer_0.mlp.dense_in.bias", HIDDEN * 4},
    {"decoder.layer_0.mlp.dense_in.weight", HIDDEN * WIDTH * 4},
    {"decoder.layer_0.mlp.dense_out.bias", WIDTH * 4},
    {"decoder.layer_0.mlp.dense_out.weight", HIDDEN * WIDTH * 4},
    {"decoder.layer_0.norm.bias", WIDTH * 4},
    {"decoder.layer_0.norm.weight", WIDTH * 4},
    {"lm.weight", WORDS * WIDTH * 4},
};

static tsh_file_desc named(void) {
    tsh_file_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.prefix = "net";
    desc.rename = renamed;
    desc.strict_names = 1;
    desc.dtype = TSH_F32;
    return desc;
}

static const char *const one_names[] = {"r1", "r2", "r3", "r4"};

static void names_are_written_back(void **state) {
    job j;
    int ranks, i;
    (void)state;
    memset(&j, 0, sizeof j);
    j.desc = named();
    for (ranks = 1; ranks <= 4; ranks++) {
        j.path = files_path(one_names[ranks - 1]);
        ranks_run_at(RANKS_FIRST, ranks, NULL, saves, &j);
        if (FILES_MINE) files_expect_same(one_names[0], one_names[ranks - 1]);
    }
    for (ranks = 1; ranks <= 4; ranks++) ranks_run_at(RANKS_FIRST, ranks, NULL, loads, &j);
    if (FILES_MINE) {
        files_bytes file = files_read(one_names[0]);
        for (i = 0; i < COUNT(stored); i++) {
            char key[96];
            (void)snprintf(key, sizeof key, "\"%s\":{\"dtype\":\"F32\"", stored[i].name);
            if (!strstr(file.at + 8, key)) fail_msg("%s is not in the file", stored[i].name);
        }
        files_free(&file);
    }
}

static void expect_refused(const tsh_rename *pairs, const char *const *ignore, const char *part) {
    job j;
    memset(&j, 0, sizeof j);
    j.path = files_path("refused");
    j.desc = named();
    j.desc.rename = pairs;
    j.desc.ignore = ignore;
    j.code = TSH_ERR_ARGUMENT;
    j.part = part;
    ranks_run_at(RANKS_FIRST, 2, NULL, saves, &j);
    if (FILES_MINE) assert_int_equal(files_count(), 0);
}

static void names_that_do_not_come_back_are_errors(void **state) {
    static const tsh_rename lost[] = {{"**.*.up.*", "**.up.*"}, {NULL, NULL}},
                            set[] = {{"**.l[ab].weight", "**.norm.weight"}, {NULL, NULL}},
                            onto[] = {{"**.up.bias", "**.down.bias2"}, {NULL, NULL}},
                            both[] = {{"**.up.bias", "**.down.bias"}, {NULL, NULL}};
    static const char *const ignored[] = {"**.norm.*", NULL};
    (void)state;
    expect_refused(lost, NULL, "\"**.*.up.*\" to \"**.up.*\" cannot be undone for \"net.h.0.up.");
    expect_refused(set, NULL, "to \"**.norm.weight\" cannot be undone for \"net.h.0.norm.weight\"");
    expect_refused(onto, NULL, "\"net.h.0.up.bias\" would be written as \"net.h.0.up.bias\", which "
                               "loading with the same .rename and .ignore would call "
                               "\"net.h.0.down.bias2\"");
    expect_refused(both, NULL, "\"net.h.0.up.bias\" would be written as \"net.h.0.up.bias\"");
    expect_refused(renamed, ignored, "\"net.h.0.norm.weight\" would be written as "
                                     "\"decoder.layer_0.norm.weight\", which loading with the same "
                                     ".rename and .ignore would skip");
}

/* ------------------------------------------------------------------------ files of a folder */

/* The model in files of at most 252 bytes of values: 168 of the embedding and 48 of the norm; up;
 * down; out. */
static const char *const shard_names[] = {
    "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors",
    "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors"};
static const char index_name[] = "model.safetensors.index.json";
static const char index_text[] =
    "{\n  \"metadata\": {\n    \"total_size\": 876\n  },\n  \"weight_map\": {\n"
    "    \"decoder.embed.weight\": \"model-00001-of-00004.safetensors\",\n"
    "    \"decoder.layer_0.mlp.dense_in.bias\": \"model-00002-of-00004.safetensors\",\n"
    "    \"decoder.layer_0.mlp.dense_in.weight\": \"model-00002-of-00004.safetensors\",\n"
    "    \"decoder.layer_0.mlp.dense_out.bias\": \"model-00003-of-00004.safetensors\",\n"
    "    \"decoder.layer_0.mlp.dense_out.weight\": \"model-00003-of-00004.safetensors\",\n"
    "    \"decoder.layer_0.norm.bias\": \"model-00001-of-00004.safetensors\",\n"
    "    \"decoder.layer_0.norm.weight\": \"model-00001-of-00004.safetensors\",\n"
    "    \"lm.weight\": \"model-00004-of-00004.safetensors\"\n  }\n}\n";

static void several_files_have_an_index(void **state) {
    files_bytes kept[COUNT(shard_names)], index;
    job j;
    int ranks, i;
    (void)state;
    memset(&j, 0, sizeof j);
    j.path = files_here;
    j.desc = named();
    j.desc.shard_bytes = 252;
    memset(kept, 0, sizeof kept);
    for (ranks = 1; ranks <= 4; ranks++) {
        if (FILES_MINE) files_clear();
        ranks_run_at(RANKS_FIRST, ranks, NULL, saves, &j);
        if (!FILES_MINE) continue;
        assert_int_equal(files_count(), COUNT(shard_names) + 1);
        index = files_read(index_name);
        if (strcmp(index.at, index_text) != 0) fail_msg("the index is\n%s", index.at);
        files_free(&index);
        for (i = 0; i < COUNT(shard_names); i++) {
            files_bytes file = files_read(shard_names[i]);
            if (ranks == 1) kept[i] = file;
            assert_int_equal(file.size, kept[i].size);
            assert_memory_equal(file.at, kept[i].at, file.size);
            if (ranks > 1) files_free(&file);
        }
    }
    for (i = 0; i < COUNT(shard_names) && FILES_MINE; i++) files_free(&kept[i]);
    for (ranks = 1; ranks <= 4; ranks++) ranks_run_at(RANKS_FIRST, ranks, NULL, loads, &j);
}

static void one_file_has_none(void **state) {
    job j;
    (void)state;
    memset(&j, 0, sizeof j);
    j.path = files_here;
    j.desc = named();
    j.desc.shard_bytes = 876;
    ranks_run_at(RANKS_FIRST, 3, NULL, saves, &j);
    if (FILES_MINE) assert_int_equal(files_count(), 1);
    ranks_run_at(RANKS_FIRST, 2, NULL, loads, &j);
    /* the folder has a model now */
    j.code = TSH_ERR_IO;
    j.part = "has model.safetensors already; .shard_bytes writes to a folder without a model";
    ranks_run_at(RANKS_FIRST, 2, NULL, saves, &j);
    if (FILES_MINE) assert_int_equal(files_count(), 1);
}

/* Two replicas of two ranks; the moments of an optimiser are among the tensors. */
static int trains(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 0.01, .zero = 1};
    const int32_t word[2] = {1, 4};
    walk w;
    tsh_optim *optim;
    uint64_t hash;
    memset(&w, 0, sizeof w);
    add_tied_model(ctx);
    tsh_each_param(tsh_root(ctx), fill, &w);
    optim = tsh_optim_new(tsh_root(ctx), &adamw);
    for (int i = 0; i < 2; i++) {
        tsh_tensor *x = tsh_forward(tsh_find(tsh_root(ctx), "embed"),
                                    tsh_from(ctx, word, tsh_shape2(1, 2), TSH_I32));
        x = tsh_forward(tsh_find(tsh_root(ctx), "h.0.up"),
                        tsh_forward(tsh_find(tsh_root(ctx), "h.0.norm"), x));
        x = tsh_forward(tsh_find(tsh_root(ctx), "h.0.down"), tsh_relu(x));
        x = tsh_mean(tsh_forward(tsh_find(tsh_root(ctx), "out"), x), TSH_ALL, 0);
        x = tsh_redistribute(x, tsh_replicated());
        CHECK(tsh_backward(ctx, x) == TSH_OK, "backward");
        CHECK(tsh_optim_step(optim) == TSH_OK, "step");
        tsh_zero_grads(tsh_root(ctx));
        (void)tsh_step_end(ctx);
    }
    CHECK(tsh_save_with(tsh_root(ctx), j->path, optim, &j->desc) == TSH_OK, "saved");
    hash = tsh_hash(ctx, tsh_param(tsh_root(ctx), "h.0.up.weight"));
    tsh_each_param(tsh_root(ctx), fill, &w);
    CHECK(tsh_load_with(tsh_root(ctx), j->path, optim, &j->desc) == TSH_OK, "loaded");
    CHECK(hash == tsh_hash(ctx, tsh_param(tsh_root(ctx), "h.0.up.weight")), "the same weight");
    return 0;
}

static void moments_are_renamed_too(void **state) {
    tsh_desc desc;
    job j;
    (void)state;
    memset(&desc, 0, sizeof desc);
    memset(&j, 0, sizeof j);
    desc.tp = 2;
    j.path = files_here;
    j.desc = named();
    j.desc.dtype = TSH_DTYPE_DEFAULT;
    j.desc.shard_bytes = 300;
    ranks_run_at(RANKS_FIRST, 4, &desc, trains, &j);
}

static void after_an_error_nothing_is_left(void **state) {
    job j;
    (void)state;
    memset(&j, 0, sizeof j);
    j.desc = named();
    j.desc.shard_bytes = 252;
    j.path = files_path("absent");
    j.code = TSH_ERR_IO;
    j.part = "absent/model-00001-of-00004.safetensors\" cannot be written: ";
    ranks_run_at(RANKS_FIRST, 2, NULL, saves, &j);
    if (FILES_MINE) assert_int_equal(files_count(), 0);
    if (FILES_MINE) files_folder(shard_names[2]); /* in the way of the third file */
    j.path = files_here;
    j.part = "model-00003-of-00004.safetensors\" is a folder; tsh_save takes one safetensors file";
    ranks_run_at(RANKS_FIRST, 3, NULL, saves, &j);
    if (FILES_MINE) assert_int_equal(files_count(), 1);
    j.desc.shard_bytes = -1;
    j.code = TSH_ERR_ARGUMENT;
    j.part = "tsh_save: .shard_bytes is -1; a folder takes whole models";
    ranks_run_at(RANKS_FIRST, 2, NULL, saves, &j);
}

/* ------------------------------------------------------------- quantised, with adapters */

/* Saves a quantised layer in F32 and in blocks; another layer reads the same values of both. */
static int dequantises(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    const tsh_linear_desc d = {.in = 96, .out = 64, .style = TSH_COLWISE};
    tsh_module *a = tsh_add_module(tsh_root(ctx), "a", NULL), *b;
    uint64_t hash;
    b = tsh_add_module(tsh_root(ctx), "b", NULL);
    tsh_add_linear(a, "l", &d);
    tsh_add_linear(b, "l", &d);
    CHECK(tsh_materialize(a) == TSH_OK && tsh_quantize(a, NULL, TSH_Q8_0) == TSH_OK, "quantised");
    CHECK(tsh_save_with(a, j->path, NULL, &j->desc) == TSH_OK, "saved");
    CHECK(tsh_load_with(b, j->path, NULL, &j->desc) == TSH_OK, "loaded");
    hash = tsh_hash(ctx, tsh_param(b, "l.weight"));
    CHECK(tsh_save(a, files_path("blocks"), NULL) == TSH_OK, "saved in blocks");
    CHECK(tsh_load(b, files_path("blocks"), NULL) == TSH_OK, "loaded");
    CHECK(hash == tsh_hash(ctx, tsh_param(b, "l.weight")), "the same values");
    return 0;
}

static void quantised_weights_are_written_as_floats(void **state) {
    job j;
    int ranks;
    (void)state;
    memset(&j, 0, sizeof j);
    j.path = files_path("floats");
    j.desc.dtype = TSH_F32;
    for (ranks = 1; ranks <= 3; ranks++) ranks_run_at(RANKS_FIRST, ranks, NULL, dequantises, &j);
}

/* Saves the weights with an adapter merged into them, and without its A and B. */
static int merges(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    const tsh_lora_desc lora = {.rank = 2};
    uint64_t plain, merged;
    job other = *j;
    tsh_tensor *up;
    walk w;
    memset(&w, 0, sizeof w);
    add_tied_model(ctx);
    CHECK(tsh_materialize(tsh_root(ctx)) == TSH_OK, "values");
    up = tsh_param(tsh_root(ctx), "h.0.up.weight");
    plain = tsh_hash(ctx, up);
    CHECK(tsh_lora(tsh_root(ctx), "h.0.up", &lora) == TSH_OK, "an adapter");
    fill("B", tsh_param(tsh_root(ctx), "h.0.up.lora_B.default.weight"), &w); /* no longer zeros */
    CHECK(tsh_save_with(tsh_root(ctx), j->path, NULL, &j->desc) != TSH_OK, "an active adapter");
    CHECK_SAYS(TSH_ERR_STATE, "\"default\" of \"h.0.up\" is not merged, and .adapter \"\" would");
    CHECK(tsh_lora_use(tsh_root(ctx), NULL) == TSH_OK, "none is active");
    CHECK(tsh_save_with(tsh_root(ctx), j->path, NULL, &j->desc) == TSH_OK, "the base model");
    CHECK(tsh_lora_use(tsh_root(ctx), "default") == TSH_OK, "active again");
    CHECK(tsh_lora_merge(tsh_root(ctx)) == TSH_OK, "merged");
    merged = tsh_hash(ctx, up);
    CHECK(plain != merged, "the weight has changed");
    CHECK(tsh_save_with(tsh_root(ctx), j->path, NULL, &j->desc) == TSH_OK, "saved");
    CHECK(tsh_lora_unmerge(tsh_root(ctx)) == TSH_OK && plain == tsh_hash(ctx, up), "unmerged");
    CHECK(tsh_load_with(tsh_root(ctx), j->path, NULL, &j->desc) == TSH_OK, "loaded");
    CHECK(merged == tsh_hash(ctx, up), "what was merged");
    CHECK(tsh_lora_free(tsh_root(ctx), NULL) == TSH_OK, "no adapters");
    other.desc.adapter = NULL;
    CHECK(tsh_load_with(tsh_root(ctx), j->path, NULL, &other.desc) == TSH_OK, "an ordinary file");
    return 0;
}

static void merged_models_are_plain(void **state) {
    job j;
    int ranks;
    (void)state;
    memset(&j, 0, sizeof j);
    j.path = files_path("plain");
    j.desc = named();
    j.desc.adapter = "";
    j.desc.dtype = TSH_DTYPE_DEFAULT;
    for (ranks = 1; ranks <= 3; ranks++) ranks_run_at(RANKS_FIRST, ranks, NULL, merges, &j);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(names_are_written_back, files_after),
        cmocka_unit_test_teardown(names_that_do_not_come_back_are_errors, files_after),
        cmocka_unit_test_teardown(several_files_have_an_index, files_after),
        cmocka_unit_test_teardown(one_file_has_none, files_after),
        cmocka_unit_test_teardown(moments_are_renamed_too, files_after),
        cmocka_unit_test_teardown(after_an_error_nothing_is_left, files_after),
        cmocka_unit_test_teardown(quantised_weights_are_written_as_floats, files_after),
        cmocka_unit_test_teardown(merged_models_are_plain, files_after),
    };
    return cmocka_run_group_tests(tests, files_begin, files_end);
}
