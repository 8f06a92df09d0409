/* examples/llm/save.h: small models of all families (of tests/llm/golden), with any weights, are
 * loaded and written back: each tensor has its name and its bits, at every degree; config.json and
 * tokenizer are copied; and what goes wrong leaves no folder. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"
#include "../../examples/llm/adapter.h"
#include "../../examples/llm/save.h"
#include <sys/resource.h>

enum { PATHS = 1024, MOST = 4 };

static char golden_folder[PATHS];

/* ------------------------------------------------------------------------ folders */

static char *read_all(const char *path, size_t *size) {
    tsh_error why;
    char *text = llm_read(path, 0, size, &why);
    if (!text) fail_msg("%s", why.message);
    return text;
}

static void write_all(const char *folder, const char *name, const void *data, size_t size) {
    char path[2 * PATHS];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file)) fail_msg("%s", path);
}

static const char *temporary(const char *name) {
    static char path[MOST][2 * FILES_SIZE];
    static int next;
    next = (next + 1) % MOST;
    (void)snprintf(path[next], sizeof path[next], "%s/%s", files_here, name);
    return path[next];
}

static int is_there(const char *path) {
    struct stat info;
    return lstat(path, &info) == 0;
}

static void remove_folder(const char *path) {
    llm_out_remove(path, LLM_OUT_DEPTH);
    assert_false(is_there(path));
}

/* Files of a folder, hidden ones too. */
static int entries(const char *path) {
    DIR *list = opendir(path);
    int n = 0;
    while (list && readdir(list)) n++;
    if (list) (void)closedir(list);
    return n - 2;
}

static cJSON *golden(const char *name) {
    char path[2 * PATHS];
    size_t size;
    (void)snprintf(path, sizeof path, "%s/%s", golden_folder, name);
    char *text = read_all(path, &size);
    cJSON *json = cJSON_Parse(text);
    free(text);
    assert_non_null(json);
    return json;
}

/* Writes model.safetensors with the tensors {name: shape} of a golden file, their names without the
 * first `cut` characters where they begin with `prefix`. */
static void write_weights(const char *folder, const cJSON *tensors, const char *prefix) {
    static char header[1 << 20];
    static unsigned char data[1 << 22];
    const cJSON *item, *d;
    size_t n = 8, at = 0;
    uint32_t random = 12345;
    header[n++] = '{';
    cJSON_ArrayForEach(item, tensors) {
        const size_t k = strlen(prefix), begin = at;
        const char *name = item->string;
        size_t count = 1;
        char *shape = cJSON_PrintUnformatted(item);
        if (k && strncmp(name, prefix, k) == 0 && name[k] == '.') name += k + 1;
        cJSON_ArrayForEach(d, item) count *= (size_t)d->valuedouble;
        for (size_t i = 0; i < count; i++, at += 4) {
            random = random * 1664525u + 1013904223u;
            const float x = (float)(random >> 8) / 16777216 - 0.5f;
            memcpy(data + at, &x, 4);
        }
        n += (size_t)snprintf(header + n, sizeof header - n,
                              "%s\"%s\":{\"dtype\":\"F32\",\"shape\":%s,"
                              "\"data_offsets\":[%zu,%zu]}",
                              n > 9 ? "," : "", name, shape, begin, at);
        free(shape);
        assert_true(at < sizeof data && n < sizeof header - 2);
    }
    header[n++] = '}';
    for (int i = 0; i < 8; i++) header[i] = (char)(unsigned char)((n - 8) >> 8 * i);
    char path[2 * PATHS];
    (void)snprintf(path, sizeof path, "%s/model.safetensors", folder);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(header, 1, n, file) != n || fwrite(data, 1, at, file) != at || fclose(file))
        fail_msg("%s", path);
}

/* Writes the folder of a model: its "config", and "tensors". */
static void write_json(const char *folder, cJSON *json, const char *prefix) {
    if (!is_there(folder)) assert_int_equal(mkdir(folder, 0777), 0);
    char *text = cJSON_Print(cJSON_GetObjectItem(json, "config"));
    write_all(folder, "config.json", text, strlen(text));
    write_weights(folder, cJSON_GetObjectItem(json, "tensors"), prefix);
    free(text);
    cJSON_Delete(json);
}

static void write_model(const char *folder, const char *name, const char *prefix) {
    write_json(folder, golden(name), prefix);
}

/* Returns the header of a file, whose bytes *bytes gets. */
static cJSON *header_of(const char *folder, char **bytes, size_t *data) {
    char path[2 * PATHS];
    size_t size, n = 0;
    (void)snprintf(path, sizeof path, "%s/model.safetensors", folder);
    *bytes = read_all(path, &size);
    for (int i = 8; i-- > 0;) n = n << 8 | (unsigned char)(*bytes)[i];
    *data = 8 + n;
    cJSON *json = cJSON_ParseWithLength(*bytes + 8, n);
    assert_non_null(json);
    cJSON_DeleteItemFromObjectCaseSensitive(json, "__metadata__");
    return json;
}

/* Tensors that the model does not have, or has under the embedding's name. */
static int may_lack(const char *name, int tied, int encoder) {
    return strstr(name, "pooler.") || strstr(name, "position_ids") || strstr(name, "inv_freq") ||
           (encoder && (strncmp(name, "cls.", 4) == 0 || strncmp(name, "lm_head.", 8) == 0)) ||
           (tied && (strcmp(name, "lm_head.weight") == 0 || strcmp(name, "embed_out.weight") == 0));
}

/* All tensors of `from` are in `to`, with the same bytes, and no others. */
static void expect_same_tensors(const char *what, const char *from, const char *to, int tied,
                                int encoder) {
    char *a, *b;
    size_t data_a, data_b;
    cJSON *x = header_of(from, &a, &data_a), *y = header_of(to, &b, &data_b);
    const cJSON *item;
    cJSON_ArrayForEach(item, x) {
        const cJSON *other = cJSON_GetObjectItemCaseSensitive(y, item->string);
        if (!other && may_lack(item->string, tied, encoder)) continue;
        if (!other) fail_msg("%s: %s is not written", what, item->string);
        const cJSON *r = cJSON_GetObjectItem(item, "data_offsets");
        const cJSON *s = cJSON_GetObjectItem(other, "data_offsets");
        const size_t begin = (size_t)r->child->valuedouble;
        const size_t n = (size_t)r->child->next->valuedouble - begin;
        if (!cJSON_Compare(cJSON_GetObjectItem(item, "shape"), cJSON_GetObjectItem(other, "shape"),
                           1) ||
            n != (size_t)(s->child->next->valuedouble - s->child->valuedouble) ||
            memcmp(a + data_a + begin, b + data_b + (size_t)s->child->valuedouble, n) != 0)
            fail_msg("%s: %s differs", what, item->string);
    }
    cJSON_ArrayForEach(item, y) if (!cJSON_GetObjectItemCaseSensitive(x, item->string))
        fail_msg("%s: %s is new", what, item->string);
    cJSON_Delete(x);
    cJSON_Delete(y);
    free(a);
    free(b);
}

/* ------------------------------------------------------------------------ loading and writing */

typedef struct job {
    const char *from, *out;
    tsh_dtype dtype, quantise;
    int merges, gguf; /* 1: merges an adapter; says that the model is a GGUF file */
    int adapts;       /* 1: adds an adapter, which is not merged */
    const char *part; /* of the error's sentence */
    int tied, encoder; /* what config.json says */
} job;

static llm_config configs[MOST];
static llm_net nets[MOST];

static int loads_and_saves(tsh_ctx *ctx, void *user) {
    job *j = (job *)user;
    llm_config *c = &configs[tsh_world(ctx)->rank];
    llm_net *m = &nets[tsh_world(ctx)->rank];
    const llm_family *family;
    const tsh_lora_desc lora = {.rank = 2};
    tsh_result result;
    CHECK(llm_config_read(c, j->from, &family), "%s", c->error);
    CHECK(llm_model_load(m, ctx, c, family, j->from, 1, 8, j->quantise) == TSH_OK, "loaded");
    if (j->merges)
        CHECK(tsh_lora(m->root, NULL, &lora) == TSH_OK && tsh_lora_merge(m->root) == TSH_OK, "");
    if (j->adapts) CHECK(tsh_lora(m->root, NULL, &lora) == TSH_OK, "an adapter");
    if (tsh_world(ctx)->rank == 0) {
        j->tied = c->tied;
        j->encoder = c->encoder;
    }
    struct gguf *own = c->gguf;
    static char none;
    if (j->gguf) c->gguf = (struct gguf *)(void *)&none;
    result = llm_model_save(m, j->from, j->out, j->dtype);
    c->gguf = own;
    llm_config_free(c);
    if (j->part) {
        CHECK(result != TSH_OK, "an error");
        CHECK_SAYS(result, j->part);
        return 0;
    }
    CHECK_OK();
    CHECK_TRUE(result == TSH_OK);
    return 0;
}

static void all_families_keep_their_names_and_bits(void **state) {
    struct dirent **list;
    const int n = scandir(golden_folder, &list, NULL, alphasort);
    const char *from = temporary("from"), *out = temporary("out");
    int models = 0;
    (void)state;
    for (int i = 0; i < n; i++) {
        const char *name = list[i]->d_name;
        job j = {.from = from, .out = out, .dtype = TSH_F32};
        for (int ranks = 1; ranks <= 3 && strstr(name, ".json"); ranks++) {
            char path[2 * PATHS];
            size_t a, b;
            if (ranks == 1) write_model(from, name, "");
            ranks_run_at(RANKS_FIRST, ranks, NULL, loads_and_saves, &j);
            expect_same_tensors(name, from, out, j.tied, j.encoder);
            assert_int_equal(entries(out), 2);
            (void)snprintf(path, sizeof path, "%s/config.json", from);
            char *own = read_all(path, &a);
            (void)snprintf(path, sizeof path, "%s/config.json", out);
            char *copy = read_all(path, &b);
            if (!strstr(own, "dtype")) assert_string_equal(own, copy);
            free(own);
            free(copy);
            remove_folder(out);
            models += ranks == 3;
        }
        free(list[i]);
    }
    free(list);
    remove_folder(from);
    assert_int_equal(entries(files_here), 0);
    assert_true(models >= 20);
}

/* Files of a base model alone, such as gpt2's on the hub, have no prefix, and get none. */
static void a_prefix_stays_absent(void **state) {
    static const char *const names[][2] = {{"gpt2.json", "transformer"}, {"bert.json", "bert"},
                                           {"opt.json", "model"}};
    const char *from = temporary("from"), *out = temporary("out");
    (void)state;
    for (int i = 0; i < COUNT(names); i++) {
        job j = {.from = from, .out = out, .dtype = TSH_F32};
        write_model(from, names[i][0], names[i][1]);
        ranks_run_at(RANKS_FIRST, 2, NULL, loads_and_saves, &j);
        expect_same_tensors(names[i][0], from, out, j.tied, j.encoder);
        remove_folder(out);
        remove_folder(from);
    }
}

static void expect_file(const char *folder, const char *name, const char *text) {
    char path[2 * PATHS];
    size_t size;
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    char *own = read_all(path, &size);
    if (strcmp(own, text) != 0) fail_msg("%s is %s", path, own);
    free(own);
}

/* What belongs to the model is copied, and the dtype's name follows the weights. */
static void other_files_are_copied(void **state) {
    static const char *const copied[] = {"tokenizer.json", "merges.txt", "spiece.model",
                                         "chat_template.jinja", "generation_config.json"};
    static const char *const left[] = {"README.md", "pytorch_model.bin", ".gitattributes", "x.py"};
    const char *from = temporary("from"), *out = temporary("out");
    char path[2 * PATHS];
    job j = {.from = from, .out = out, .dtype = TSH_BF16};
    size_t size;
    (void)state;
    write_model(from, "llama.json", "");
    for (int i = 0; i < COUNT(copied); i++) write_all(from, copied[i], "{\n}", 3);
    for (int i = 0; i < COUNT(left); i++) write_all(from, left[i], "", 0);
    (void)snprintf(path, sizeof path, "%s/config.json", from);
    char *config = read_all(path, &size);
    cJSON *json = cJSON_Parse(config);
    (void)cJSON_DeleteItemFromObject(json, "dtype");
    (void)cJSON_DeleteItemFromObject(json, "torch_dtype");
    free(config);
    config = cJSON_PrintUnformatted(json);
    config[strlen(config) - 1] = 0; /* without its } */
    static char with[1 << 14], wanted[1 << 14];
    (void)snprintf(with, sizeof with, "%s , \"torch_dtype\" : \"float32\" ,\n \"dtype\":null}\n",
                   config);
    (void)snprintf(wanted, sizeof wanted,
                   "%s , \"torch_dtype\" : \"bfloat16\" ,\n \"dtype\":\"bfloat16\"}\n", config);
    free(config);
    cJSON_Delete(json);
    write_all(from, "config.json", with, strlen(with));
    (void)snprintf(path, sizeof path, "%s/additional_chat_templates", from);
    assert_int_equal(mkdir(path, 0777), 0);
    write_all(path, "tools.jinja", "tools", 5);
    ranks_run_at(RANKS_FIRST, 2, NULL, loads_and_saves, &j);
    for (int i = 0; i < COUNT(copied); i++) expect_file(out, copied[i], "{\n}");
    expect_file(out, "config.json", wanted);
    expect_file(out, "additional_chat_templates/tools.jinja", "tools");
    assert_int_equal(entries(out), COUNT(copied) + 3);
    remove_folder(out);
    /* an empty folder that is there becomes the new one; adapters are merged, and leave no names */
    assert_int_equal(mkdir(out, 0777), 0);
    j.dtype = TSH_F32;
    j.merges = 1; /* B is zero: the weights keep their bits */
    ranks_run_at(RANKS_FIRST, 3, NULL, loads_and_saves, &j);
    expect_same_tensors("merged", from, out, j.tied, j.encoder);
    remove_folder(out);
    remove_folder(from);
}

/* A model with whole blocks of 32 weights. */
static const char wide[] =
    "{\"config\": {\"model_type\": \"llama\", \"vocab_size\": 40, \"hidden_size\": 64,"
    " \"num_hidden_layers\": 1, \"num_attention_heads\": 2, \"intermediate_size\": 128,"
    " \"dtype\": \"float32\"},"
    " \"tensors\": {\"model.embed_tokens.weight\": [40, 64],"
    " \"model.layers.0.input_layernorm.weight\": [64],"
    " \"model.layers.0.self_attn.q_proj.weight\": [64, 64],"
    " \"model.layers.0.self_attn.k_proj.weight\": [64, 64],"
    " \"model.layers.0.self_attn.v_proj.weight\": [64, 64],"
    " \"model.layers.0.self_attn.o_proj.weight\": [64, 64],"
    " \"model.layers.0.post_attention_layernorm.weight\": [64],"
    " \"model.layers.0.mlp.gate_proj.weight\": [128, 64],"
    " \"model.layers.0.mlp.up_proj.weight\": [128, 64],"
    " \"model.layers.0.mlp.down_proj.weight\": [64, 128],"
    " \"model.norm.weight\": [64], \"lm_head.weight\": [40, 64]}}";

/* Quantised weights are written if a dtype is asked for. */
static void quantised_models_are_written_in_a_dtype(void **state) {
    const char *from = temporary("from"), *out = temporary("out");
    job j = {.from = from, .out = out, .quantise = TSH_Q8_0};
    (void)state;
    write_json(from, cJSON_Parse(wide), "");
    j.part = "has quantised weights here, which transformers does not read: name a dtype";
    ranks_run_at(RANKS_FIRST, 1, NULL, loads_and_saves, &j);
    assert_false(is_there(out));
    j.part = NULL;
    j.dtype = TSH_BF16;
    ranks_run_at(RANKS_FIRST, 2, NULL, loads_and_saves, &j);
    j.from = out; /* which loads */
    j.out = temporary("again");
    j.quantise = TSH_DTYPE_DEFAULT;
    ranks_run_at(RANKS_FIRST, 1, NULL, loads_and_saves, &j);
    expect_same_tensors("quantised", j.from, j.out, j.tied, j.encoder);
    remove_folder(j.out);
    remove_folder(out);
    remove_folder(from);
}

/* ------------------------------------------------------------------------ errors */

static void expect_refused(job j, const char *part) {
    j.part = part;
    ranks_run_at(RANKS_FIRST, 2, NULL, loads_and_saves, &j);
}

static void after_errors_nothing_is_there(void **state) {
    const char *from = temporary("from"), *out = temporary("out");
    char path[2 * PATHS];
    struct rlimit limit, small;
    tsh_error why;
    job j = {.from = from, .out = out};
    (void)state;
    write_model(from, "llama.json", "");
    j.gguf = 1;
    expect_refused(j, "is a GGUF file, which has no config.json to write a folder with");
    j.gguf = 0;
    j.adapts = 1;
    expect_refused(j, "is not merged, and .adapter \"\" would leave it out; first call");
    j.adapts = 0;
    j.out = "/nonexistent/out";
    expect_refused(j, "/nonexistent/out cannot be written: No such file or directory");
    j.out = from;
    expect_refused(j, "is a folder with files, which stay as they are; give the name of a new");
    j.out = out;
    assert_true(llm_out_check(out, &why));
    assert_false(llm_out_check(".", &why) || llm_out_check("", &why) || llm_out_check("/", &why));
    assert_int_equal(entries(files_here), 1);
    /* no room for the weights, as on a full disk */
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    small = limit;
    small.rlim_cur = 4096;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    j.part = "model.safetensors\" cannot be written: it would have";
    const char *failed;
    const int result = ranks_try(2, NULL, loads_and_saves, &j, &failed);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    if (result) fail_msg("%s", failed);
    assert_int_equal(entries(files_here), 1);
    /* what a killed process has left is removed by the next that writes this folder */
    char host[65] = "";
    (void)gethostname(host, sizeof host - 1);
    (void)snprintf(path, sizeof path, "%s/.out.tmp-%s-1-0", files_here, host);
    assert_int_equal(mkdir(path, 0777), 0);
    write_all(path, "model.safetensors", "x", 1);
    j.part = NULL;
    ranks_run_at(RANKS_FIRST, 1, NULL, loads_and_saves, &j);
    assert_int_equal(entries(files_here), 2);
    remove_folder(out);
    remove_folder(from);
}

/* An adapter's folder, as a program writes it: the folder, the adapter, the tokenizer. */
static int saves_an_adapter(tsh_ctx *ctx, void *user) {
    const job *j = (const job *)user;
    const tsh_linear_desc d = {.in = 8, .out = 6, .style = TSH_COLWISE};
    static llm_adapter a[MOST];
    static llm_out folder[MOST];
    llm_adapter *own = &a[tsh_world(ctx)->rank];
    llm_out *o = &folder[tsh_world(ctx)->rank];
    memset(own, 0, sizeof *own);
    own->lora.rank = 2;
    own->count = 1;
    (void)strcpy(own->targets[0], "q_proj");
    (void)tsh_add_linear(tsh_add_module(tsh_root(ctx), "h", NULL), "q_proj", &d);
    CHECK_TRUE(llm_adapter_add(tsh_root(ctx), own) == TSH_OK);
    CHECK_TRUE(llm_out_begin(ctx, o, j->out) == TSH_OK);
    CHECK_TRUE(llm_adapter_save(tsh_root(ctx), own, o->temporary, NULL) == TSH_OK);
    CHECK_TRUE(llm_out_tokenizer(ctx, o, j->from) == TSH_OK);
    CHECK(!is_there(j->out), "not before the end");
    CHECK_TRUE(llm_out_commit(ctx, o) == TSH_OK);
    llm_out_abort(o); /* does nothing */
    CHECK(llm_out_begin(ctx, o, j->out) != TSH_OK, "it is there");
    CHECK_SAYS(TSH_ERR_IO, "is a folder with files");
    return 0;
}

static void adapters_have_folders_too(void **state) {
    const char *from = temporary("from"), *out = temporary("out");
    job j = {.from = from, .out = out};
    (void)state;
    assert_int_equal(mkdir(from, 0777), 0);
    write_all(from, "tokenizer.json", "{}", 2);
    write_all(from, "config.json", "{}", 2);
    ranks_run_at(RANKS_FIRST, 2, NULL, saves_an_adapter, &j);
    assert_int_equal(entries(out), 3);
    expect_file(out, "tokenizer.json", "{}");
    remove_folder(out);
    remove_folder(from);
    assert_int_equal(entries(files_here), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_families_keep_their_names_and_bits),
        cmocka_unit_test(a_prefix_stays_absent),
        cmocka_unit_test(other_files_are_copied),
        cmocka_unit_test(quantised_models_are_written_in_a_dtype),
        cmocka_unit_test(after_errors_nothing_is_there),
        cmocka_unit_test(adapters_have_folders_too),
    };
    (void)snprintf(golden_folder, sizeof golden_folder, "%.*sgolden",
                   (int)(strrchr(__FILE__, '/') - __FILE__ + 1), __FILE__);
    return cmocka_run_group_tests(tests, files_begin, files_end);
}
