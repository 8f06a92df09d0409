/* tsh_load and files that are not what they should be: each is an error of one sentence that
 * changes nothing, or a load; never a crash. */
#include "../../tshard.h"
#include "../support/unit.h"
#include "../support/files.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

static files_bytes good;             /* what tsh_save wrote for model() */
static const tsh_optim_desc *wanted; /* load() has such an optimiser; NULL: none */

static tsh_module *model(tsh_ctx *ctx) {
    const tsh_linear_desc d = {.in = 2, .out = 3};
    tsh_add_linear(tsh_root(ctx), "a", &d);
    tsh_add_dropout(tsh_root(ctx), "d", 0.5);
    return tsh_root(ctx);
}

static int make_good(void **state) {
    tsh_ctx *ctx;
    if (files_begin(state)) return 1;
    ctx = unit_open(NULL);
    model(ctx);
    (void)tsh_forward(tsh_find(tsh_root(ctx), "d"), tsh_ones(ctx, tsh_shape1(2)));
    assert_int_equal(tsh_save(tsh_root(ctx), files_path("good"), NULL), TSH_OK);
    unit_close(ctx);
    good = files_read("good");
    files_clear();
    return 0;
}

static int free_good(void **state) {
    files_free(&good);
    return files_end(state);
}

/* Loads "x" into a model that holds values. An error has a sentence and changes nothing. */
static tsh_result load(char *message) {
    const tsh_desc desc = {.seed = 5};
    tsh_ctx *ctx = unit_open(&desc);
    tsh_tensor *w = tsh_param(model(ctx), "a.weight");
    uint64_t before = tsh_hash(ctx, w);
    tsh_optim *optim = wanted ? tsh_optim_new(tsh_root(ctx), wanted) : NULL;
    tsh_result result = tsh_load(tsh_root(ctx), files_path("x"), optim);
    if (message) strcpy(message, tsh_last_error(ctx)->message);
    assert_int_equal(tsh_last_error(ctx)->code, result);
    if (result != TSH_OK) {
        tsh_ctx *fresh = unit_open(&desc);
        assert_true(strlen(tsh_last_error(ctx)->message) > 30);
        tsh_clear_error(ctx);
        assert_int_equal(tsh_hash(ctx, w), before);
        assert_int_equal(tsh_optim_state(optim).steps, 0);
        assert_int_equal(tsh_hash(ctx, tsh_randn(ctx, tsh_shape1(2))),
                         tsh_hash(fresh, tsh_randn(fresh, tsh_shape1(2))));
        unit_close(fresh);
    }
    unit_close(ctx);
    return result;
}

static tsh_result load_bytes(const void *bytes, size_t size, char *message) {
    files_write("x", bytes, size);
    return load(message);
}

/* Loads a file of this header and `values` bytes of zeros. */
static tsh_result load_header(const char *header, size_t values, char *message) {
    const size_t n = strlen(header);
    char *bytes = (char *)calloc(8 + n + values, 1);
    tsh_result result;
    bytes[0] = (char)(n & 255);
    bytes[1] = (char)(n >> 8 & 255);
    memcpy(bytes + 8, header, n);
    result = load_bytes(bytes, 8 + n + values, message);
    free(bytes);
    return result;
}

/* -------------------------------------------------------------------- one by one */

#define A       "\"a.weight\":{\"dtype\":\"F32\",\"shape\":[3,2],\"data_offsets\":[0,24]}"
#define B       "\"a.bias\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[24,36]}"
#define X(text) "{" A "," B "," text "}"

typedef struct wrong {
    const char *header;
    size_t values;
    const char *part; /* of the sentence; NULL: it loads */
} wrong;

static const wrong headers[] = {
    {"{" A "," B "}", 36, NULL},
    {" {" A "," B "}", 36, "there is no {"},
    {"{" B "," A "}   ", 36, NULL}, /* another order, and blanks */
    {"{ " A "\n,\t" B "\r\n}\n", 36, NULL},
    {X("\"__metadata__\":{}"), 36, NULL},
    {X("\"__metadata__\":null"), 36, NULL},
    {X("\"__metadata__\":{\"a\":\"b\",\"c\":\"\\u00e4\\ud83d\\ude00\\n\"}"), 36, NULL},
    {"{\"\\u0061.\\u0077eight\":{\"data_offsets\" : [ 0 , 24 ] , \"shape\":[3,2],\"dtype\":\"F32\"}"
     "," B "}",
     36, NULL},
    /* no JSON, or other JSON */
    {"{}", 0, "lacks 2 of the model's tensors (\"a.weight\")"},
    {"[]", 0, "there is no {"},
    {"nonsense", 0, "there is no {"},
    {"{\"a.weight\"}", 0, "a colon is missing at byte 11 of its header"},
    {"{\"a.weight\":3}", 0, "a tensor is no object"},
    {"{\"a.weight\":[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]}", 0, "a tensor is no object"},
    {"{\"a\":{\"shape\":[[1]]}}", 0, "there is no whole number"},
    {"{\"a\":{\"shape\":{}}}", 0, "there is no list"},
    {"{\"a\":{\"dtype\":3}}", 0, "there is no string"},
    {"{\"a\":{}}", 0, "there is no string"},
    {"{" A "," B, 36, "a comma or a bracket is missing"},
    {"{" A "," B "},", 36, "something follows the last }"},
    {"{" A "," B "}{}", 36, "something follows the last }"},
    {"{" A "," B ",}", 36, "there is no string"},
    {"{" A " " B "}", 36, "a comma or a bracket is missing"},
    {X("\"__metadata__\":[]"), 36, "__metadata__ is no object"},
    {X("\"__metadata__\":nul"), 36, "__metadata__ is no object"},
    {X("\"__metadata__\":{\"a\":1}"), 36, "there is no string"},
    {X("\"__metadata__\":{\"a\":{\"b\":\"c\"}}"), 36, "there is no string"},
    {X("\"__metadata__\":{\"a\":\"b\",}"), 36, "there is no string"},
    {X("\"__metadata__\":{\"a\":\"b\"},\"__metadata__\":{}"), 36, "__metadata__ is there twice"},
    {X("\"__metadata__\":{\"a\":\"b\",\"c\":\"d\",\"a\":\"e\"}"), 36,
     "\"a\" is twice in __metadata__"},
    /* keys */
    {X(A), 36, "overlaps another tensor"},
    {X("\"a.bias\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[36,48]}"), 48,
     "\"a.bias\" is there twice"},
    {X("\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[36,36]},"
       "\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[36,36]}"),
     36, "\"e\" is there twice"},
    {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 0, "a key is unknown or twice there"},
    {"{\"a\":{\"dtype\":\"F32\",\"strides\":[1]}}", 0, "a key is unknown or twice there"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", 4, "lacks its dtype, shape or two data_offsets"},
    {"{\"a\":{\"shape\":[],\"data_offsets\":[0,4]}}", 4, "lacks its dtype"},
    {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "lacks its dtype"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[4]}}", 4, "or two data_offsets"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4,4]}}", 4, "or two data_offsets"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4,
     "has 1 that the model lacks (\"a\")"},
    {X("\"a.bias\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[36,38]}"), 38,
     "\"a.bias\" is there twice"},
    {"{\"a\":{\"dtype\":\"F31\",\"shape\":[],\"data_offsets\":[0,4]}}", 4,
     "has 1 that the model lacks (\"a\")"},
    {"{\"a\":{\"dtype\":\"f32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4,
     "has 1 that the model lacks (\"a\")"},
    /* numbers */
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "no whole number"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4,
     "a comma or a bracket"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1e0],\"data_offsets\":[0,4]}}", 4,
     "a comma or a bracket"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[01],\"data_offsets\":[0,4]}}", 4, "no whole number"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[true],\"data_offsets\":[0,4]}}", 4, "no whole number"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[18446744073709551617],\"data_offsets\":[0,4]}}", 4,
     "a number is too large"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999999],\"data_offsets\":[0,4]}}", 4,
     "a number is too large"},
    /* 2^62 and 2^31 x 2^31 x 2^2: products that overflow */
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0,
     "a number is too large"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387900],\"data_offsets\":[0,0]}}", 0,
     "\"a\" has a shape that no file can hold"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2147483648,2147483648,4],\"data_offsets\":[0,0]}}", 0,
     "has a shape that no file can hold"},
    /* offsets */
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8, "do not fit its shape"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,7]}}", 8, "do not fit its shape"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,9]}}", 8, "do not fit its shape"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
     "do not fit its shape"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12, "or leaves a gap"},
    {"{" A ",\"a.bias\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[28,40]}}", 40,
     "\"a.bias\" overlaps another tensor, or leaves a gap"},
    {"{" A ",\"a.bias\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[20,32]}}", 32,
     "\"a.bias\" overlaps another tensor, or leaves a gap"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[500000000000000000],\"data_offsets\":"
     "[0,2000000000000000000]}}",
     0, "its values are cut off"},
    {"{" A "," B "}", 35, "its values are cut off"},
    {"{" A "," B "}", 0, "its values are cut off"},
    {"{" A "," B "}", 37, "something follows its values"},
    {"{}", 1, "something follows its values"},
    /* strings: UTF-8 and escapes */
    {X("\"\xff\":{}"), 36, "or is not UTF-8"},
    {X("\"\xc0\xaf\":{}"), 36, "or is not UTF-8"},         /* not the shortest form */
    {X("\"\xe0\x80\xaf\":{}"), 36, "or is not UTF-8"},     /* likewise */
    {X("\"\xf0\x80\x80\xaf\":{}"), 36, "or is not UTF-8"}, /* likewise */
    {X("\"\xed\xa0\x80\":{}"), 36, "or is not UTF-8"},     /* half a surrogate pair */
    {X("\"\xf4\x90\x80\x80\":{}"), 36, "or is not UTF-8"}, /* beyond U+10FFFF */
    {X("\"\xf5\x80\x80\x80\":{}"), 36, "or is not UTF-8"},
    {X("\"\xe2\x82\":{}"), 36, "or is not UTF-8"}, /* cut off */
    {X("\"\x80\":{}"), 36, "or is not UTF-8"},
    {X("\"a\nb\":{}"), 36, "or is not UTF-8"},
    {X("\"a"), 36, "a string does not end"},
    {X("\"a\\x41\":{}"), 36, "an escape in a string is wrong"},
    {X("\"a\\u12g4\":{}"), 36, "an escape in a string is wrong"},
    {X("\"a\\u0000\":{}"), 36, "an escape in a string is wrong"},
    {X("\"a\\ud800\":{}"), 36, "an escape in a string is wrong"},
    {X("\"a\\ud800\\u0041\":{}"), 36, "an escape in a string is wrong"},
    {X("\"a\\udc00\":{}"), 36, "an escape in a string is wrong"},
    {"{\"a\\", 0, "an escape in a string is wrong"},
    {"{\"a\\u", 0, "an escape in a string is wrong"},
    {"{\"a", 0, "a string does not end"},
    {X("\"a\\u001b[2J\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[36,36]}"), 36,
     "(\"a?[2J\")"}, /* terminals are spared */
    /* what the model is not */
    {"{" A "}", 24, "lacks 1 of the model's tensors (\"a.bias\")"},
    {X("\"e\":{\"dtype\":\"I64\",\"shape\":[2,0],\"data_offsets\":[36,36]}"), 36,
     "has 1 that the model lacks (\"e\")"},
    {X("\"optim.first.a.bias\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[36,48]}"), 48,
     NULL}, /* without an optimiser its moments are skipped */
    {X("\"optim.fourth.a.bias\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[36,48]}"), 48,
     "has 1 that the model lacks (\"optim.fourth.a.bias\")"},
    {"{" A ",\"a.bias\":{\"dtype\":\"F32\",\"shape\":[3,1],\"data_offsets\":[24,36]}}", 36,
     "\"a.bias\" is F32 (3, 1) in"},
    {"{" A ",\"a.bias\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[24,28]}}", 28,
     "\"a.bias\" is F32 () in"},
    {"{" A ",\"a.bias\":{\"dtype\":\"I32\",\"shape\":[3],\"data_offsets\":[24,36]}}", 36,
     "\"a.bias\" is I32 (3) in"},
    {"{" A ",\"a.bias\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[24,27]}}", 27,
     "F32 (3) in the model; only F32, F64, BF16 and F16 are converted to each other"},
    {"{" A ",\"a.bias\":{\"dtype\":\"F16\",\"shape\":[3],\"data_offsets\":[24,30]}}", 30,
     NULL},
    /* quantised weights */
    {X("\"__metadata__\":{\"tshard.dtype.a.weight\":\"q8_0\"}"), 36, NULL}, /* it is F32 */
    {"{" A ",\"a.bias\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[24,27]},"
     "\"__metadata__\":{\"tshard.dtype.a.bias\":\"q9_0\"}}",
     27, "\"a.bias\" is U8 (3) in"},
    {"{" A ",\"a.bias\":{\"dtype\":\"U8\",\"shape\":[34],\"data_offsets\":[24,58]},"
     "\"__metadata__\":{\"tshard.dtype.a.bias\":\"q8_0\"}}",
     58, "\"a.bias\" is U8 (34) in"},
    {"{" A ",\"a.bias\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[24,24]},"
     "\"__metadata__\":{\"tshard.dtype.a.bias\":\"q8_0\"}}",
     24, "blocks of 32 of q8_0"},
    /* the state that tsh_save adds */
    {X("\"__metadata__\":{\"tshard.format\":\"2\"}"), 36, "is of tshard's format 2"},
    {X("\"__metadata__\":{\"tshard.seed\":\"1\"}"), 36,
     "has no whole number as \"tshard.randn_calls\""},
    {X("\"__metadata__\":{\"tshard.seed\":\"-1\"}"), 36, "no whole number as \"tshard.seed\""},
    {X("\"__metadata__\":{\"tshard.seed\":\"\"}"), 36, "no whole number as \"tshard.seed\""},
    {X("\"__metadata__\":{\"tshard.seed\":\"18446744073709551616\"}"), 36,
     "no whole number as \"tshard.seed\""},
    {X("\"__metadata__\":{\"tshard.seed\":\"18446744073709551615\",\"tshard.randn_calls\":\"0\","
       "\"tshard.dropout_calls\":\"0\"}"),
     36, NULL},
    {X("\"__metadata__\":{\"tshard.seed\":\"1\",\"tshard.randn_calls\":\"0\","
       "\"tshard.dropout_calls\":\"0\",\"tshard.dropout_calls.d\":\"1x\"}"),
     36, "no whole number as \"tshard.dropout_calls.d\""},
};

static void expect_wrong(const wrong *each, int count) {
    char message[TSH_MESSAGE_SIZE];
    int i;
    for (i = 0; i < count; i++) {
        tsh_result result = load_header(each[i].header, each[i].values, message);
        if ((result == TSH_OK) != !each[i].part || (each[i].part && !strstr(message, each[i].part)))
            fail_msg("%s: %s \"%s\", not \"%s\"", each[i].header, tsh_result_name(result), message,
                     each[i].part ? each[i].part : "a load");
        if (result != TSH_OK && strncmp(message, "tsh_load: \"", 11) != 0) fail_msg("%s", message);
    }
}

static void every_mistake_has_its_sentence(void **state) {
    (void)state;
    expect_wrong(headers, COUNT(headers));
}

/* -------------------------------------------------------- the state of an optimiser */

#define STATE(kind, weight, bias)                                                                  \
    "\"__metadata__\":{\"tshard.optim\":\"" kind "\",\"tshard.optim.steps\":\"2\","                \
    "\"tshard.optim.skipped\":\"0\",\"tshard.optim.steps.a.weight\":\"" weight "\","               \
    "\"tshard.optim.steps.a.bias\":\"" bias "\"}"
#define MOMENT(which, from, to)                                                                    \
    "\"optim." which ".a.bias\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[" from "," to   \
    "]}"

static const wrong adam_headers[] = {
    {"{" A "," B "}", 36, "holds no optimiser's state, the optimiser is adam"},
    {X(STATE("sgd", "0", "0")), 36, "holds the state of \"sgd\", the optimiser is adam"},
    {X(STATE("adam", "0", "0")), 36, NULL},
    {X(STATE("adam", "0", "2") "," MOMENT("first", "36", "48") "," MOMENT("second", "48", "60")),
     60, NULL},
    {X(STATE("adam", "0", "2") "," MOMENT("first", "36", "48")), 48,
     "lacks 1 of the model's tensors (\"optim.second.a.bias\")"},
    {X(STATE("adam", "2", "0")), 36, "lacks 2 of the model's tensors (\"optim.first.a.weight\")"},
    {X(STATE("adam", "0", "x")), 36, "no whole number as \"tshard.optim.steps.a.bias\""},
    {X(STATE("adam", "0", "0\",\"tshard.optim.steps.a.bias\":\"0")), 36,
     "is twice in __metadata__"},
    {X("\"__metadata__\":{\"tshard.optim\":\"adam\",\"tshard.optim.steps\":\"2\"}"), 36,
     "no whole number as \"tshard.optim.skipped\""},
    {X(STATE("adam", "0", "2") ",\"optim.first.a.bias\":{\"dtype\":\"F32\",\"shape\":[1,3],"
                               "\"data_offsets\":[36,48]}"),
     48, "\"optim.first.a.bias\" is F32 (1, 3) in"},
    {X(STATE("adam", "0", "0") ",\"optim.first.c\":{\"dtype\":\"F32\",\"shape\":[3],"
                               "\"data_offsets\":[36,48]}"),
     48, "has 1 that the model lacks (\"optim.first.c\")"},
};
static const wrong sgd_headers[] = {
    {X(STATE("sgd", "0", "2")), 36, NULL},
    {X(STATE("sgd", "0", "2") "," MOMENT("first", "36", "48")), 48, NULL},
};

static void every_mistake_in_an_optimiser_has_its_sentence(void **state) {
    static const tsh_optim_desc adam = {.kind = TSH_ADAM}, sgd = {.momentum = 0.9};
    (void)state;
    wanted = &adam;
    expect_wrong(adam_headers, COUNT(adam_headers));
    wanted = &sgd;
    expect_wrong(sgd_headers, COUNT(sgd_headers));
    wanted = NULL;
}

/* The length of the header: too small, beyond the file, beyond 100 MB, beyond 2^63. */
static void the_length_of_the_header_is_checked(void **state) {
    static const unsigned char lengths[][8] = {{0},
                                               {1},
                                               {255, 255},
                                               {1, 0xE1, 0xF5, 5}, /* 100,000,001 */
                                               {0, 0xE1, 0xF5, 5},
                                               {0, 0, 0, 0, 1},
                                               {0, 0, 0, 0, 0, 0, 0, 128},
                                               {255, 255, 255, 255, 255, 255, 255, 127},
                                               {255, 255, 255, 255, 255, 255, 255, 255}};
    char bytes[64], message[TSH_MESSAGE_SIZE];
    int i;
    (void)state;
    for (i = 0; i < COUNT(lengths); i++) {
        memset(bytes, ' ', sizeof bytes);
        memcpy(bytes, lengths[i], 8);
        memcpy(bytes + 8, "{}", 2);
        assert_int_equal(load_bytes(bytes, sizeof bytes, message), TSH_ERR_IO);
        if (!strstr(message, "its header would have ")) fail_msg("%d: %s", i, message);
    }
    for (i = 1; i < 8; i++) {
        assert_int_equal(load_bytes(bytes, (size_t)i, message), TSH_ERR_IO);
        assert_non_null(strstr(message, "it ends within the first 8 bytes"));
    }
}

/* What is given for a safetensors file now and then. */
static void other_formats_are_named(void **state) {
    static const struct {
        const char *bytes;
        size_t size; /* 0: of the text */
        const char *part;
    } rows[] = {
        {"", 0, "is an empty file;"},
        {"{\"metadata\": {\"total_size\": 1}, \"weight_map\": {}}", 0,
         "is JSON text, such as the index of a sharded checkpoint, whose name must end with "
         ".json;"},
        {"PK\3\4\24\0\0\10\10\0\0\0\0\0", 14, "is a zip archive, as torch.save writes"},
        {"\x80\2\x8a\nl\xfc\x9c\x46\xf9 j", 11, "is a pickle, as torch.save writes"},
        {"\x80\4\x95\x1d\0\0\0\0\0\0\0}", 12, "is a Python pickle;"},
        {"GGUF\3\0\0\0\1\0\0\0", 12, "is a GGUF file;"},
        {"\x93NUMPY\1\0v\0{", 11, "is a NumPy array;"},
        {"\x89HDF\r\n\032\n\0\0", 10, "is an HDF5 file;"},
        {"<!doctype html><html>404</html>", 0, "is HTML or XML, such as the page of"},
        {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", 0,
         "is a git-lfs pointer (`git lfs pull` fetches the file);"},
        {"# Model\n\nThis is one.\n", 0, "is a text;"},
        {"hello\n", 0, "is a text;"},
    };
    char message[TSH_MESSAGE_SIZE];
    int i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        const size_t size = rows[i].size ? rows[i].size : strlen(rows[i].bytes);
        assert_int_equal(load_bytes(rows[i].bytes, size, message), TSH_ERR_IO);
        if (!strstr(message, rows[i].part) || !strstr(message, "tsh_load takes one safetensors"))
            fail_msg("%d: %s", i, message);
    }
}

/* A NUL in the header is no end of it. */
static void a_nul_is_refused_wherever_it_stands(void **state) {
    size_t at, n = 8 + (size_t)(unsigned char)good.at[0] + 256 * (size_t)(unsigned char)good.at[1];
    (void)state;
    for (at = 8; at < n; at++) {
        const char old = good.at[at];
        good.at[at] = '\0';
        assert_int_not_equal(load_bytes(good.at, good.size, NULL), TSH_OK);
        good.at[at] = old;
    }
}

static void every_cut_is_refused(void **state) {
    size_t size;
    (void)state;
    assert_int_equal(load_bytes(good.at, good.size, NULL), TSH_OK);
    for (size = 0; size < good.size; size++)
        assert_int_equal(load_bytes(good.at, size, NULL), TSH_ERR_IO);
}

/* Each byte with other bits: an error, or a load where it was a value or a count. */
static void every_byte_may_be_wrong(void **state) {
    static const unsigned char flips[] = {1, 2, 4, 8, 16, 32, 64, 128, 255};
    size_t at, loads = 0;
    int i;
    (void)state;
    for (at = 0; at < good.size; at++)
        for (i = 0; i < COUNT(flips); i++) {
            good.at[at] = (char)((unsigned char)good.at[at] ^ flips[i]);
            if (load_bytes(good.at, good.size, NULL) == TSH_OK) loads++;
            good.at[at] = (char)((unsigned char)good.at[at] ^ flips[i]);
        }
    assert_true(loads >= 36 * COUNT(flips));           /* values */
    assert_true(loads < good.size * COUNT(flips) / 2); /* most of a header means something */
}

/* A header of many tensors is sorted, not compared by pairs: 200,000 take well under a second. */
static void a_long_header_is_read_in_time(void **state) {
    enum { N = 200000, LONGEST = 64 };
    char *header = (char *)malloc((size_t)N * LONGEST + 2), *at = header, message[TSH_MESSAGE_SIZE],
         *bytes;
    size_t n, i;
    (void)state;
    *at++ = '{';
    for (i = 0; i < N; i++)
        at += sprintf(at, "%s\"%zu\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
                      i ? "," : "", i * 7919 % N);
    *at++ = '}';
    n = (size_t)(at - header);
    bytes = (char *)calloc(8 + n, 1);
    for (i = 0; i < 8; i++) bytes[i] = (char)((uint64_t)n >> 8 * i & 255);
    memcpy(bytes + 8, header, n);
    assert_int_equal(load_bytes(bytes, 8 + n, message), TSH_ERR_ARGUMENT);
    assert_non_null(strstr(message, "has 200000 that the model lacks (\"0\")"));
    free(bytes);
    free(header);
}

static char heard[16][TSH_MESSAGE_SIZE];
static int messages;

static void hear(const char *message, void *user) {
    (void)user;
    if (messages < COUNT(heard)) strcpy(heard[messages], message);
    messages++;
}

/* NaN and infinity are loaded, and the logger is told: eight tensors by name, then a number. */
static void values_that_are_not_finite_are_told(void **state) {
    const tsh_desc desc = {.logger.log = hear};
    const tsh_layer_norm_desc d = {.dim = 3};
    const tsh_real odd[] = {(tsh_real)NAN, 2, (tsh_real)-INFINITY};
    tsh_ctx *ctx = unit_open(&desc);
    char name[16];
    int i;
    (void)state;
    for (i = 0; i < 12; i++) {
        tsh_module *m;
        (void)snprintf(name, sizeof name, "n%d", i);
        m = tsh_add_layer_norm(tsh_root(ctx), name, &d);
        if (i == 3 || i == 5)
            assert_int_equal(tsh_write(ctx, tsh_param(m, "bias"), TSH_GLOBAL, odd, sizeof odd),
                             TSH_OK);
    }
    messages = 0;
    assert_int_equal(tsh_save(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
    assert_int_equal(tsh_load(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
    assert_int_equal(messages, 2);
    assert_non_null(strstr(heard[0], "\"n3.bias\" holds 1 NaN and 1 infinite values among the 3 "
                                     "that rank 0 read"));
    assert_non_null(strstr(heard[1], "\"n5.bias\""));
    for (i = 0; i < 12; i++)
        assert_int_equal(tsh_write(ctx, tsh_param(tsh_child(tsh_root(ctx), i), "weight"),
                                   TSH_GLOBAL, odd, sizeof odd),
                         TSH_OK);
    messages = 0;
    assert_int_equal(tsh_save(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
    assert_int_equal(tsh_load(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
    assert_int_equal(messages, 9);
    assert_non_null(strstr(heard[8], "6 more tensors that rank 0 read hold NaN or infinity"));
    unit_close(ctx);
}

/* Not between steps: what is recorded still uses the old values. */
static void a_recorded_step_must_end_first(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *w = tsh_param(model(ctx), "a.weight");
    (void)state;
    files_write("x", good.at, good.size);
    (void)tsh_sum(tsh_mul(w, w), TSH_ALL, 0);
    assert_int_equal(tsh_load(tsh_root(ctx), files_path("x"), NULL), TSH_ERR_STATE);
    EXPECT(TSH_ERR_STATE, "end the step first: tsh_step_end");
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
    assert_int_equal(tsh_load(tsh_root(ctx), files_path("x"), NULL), TSH_OK);
    unit_close(ctx);
}

#define TEST(f) cmocka_unit_test_teardown(f, files_after)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(every_mistake_has_its_sentence),
        TEST(every_mistake_in_an_optimiser_has_its_sentence),
        TEST(the_length_of_the_header_is_checked),
        TEST(other_formats_are_named),
        TEST(a_nul_is_refused_wherever_it_stands),
        TEST(every_cut_is_refused),
        TEST(every_byte_may_be_wrong),
        TEST(a_long_header_is_read_in_time),
        TEST(values_that_are_not_finite_are_told),
        TEST(a_recorded_step_must_end_first),
    };
    return cmocka_run_group_tests_name("io malformed", tests, make_good, free_good);
}
