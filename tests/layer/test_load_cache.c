/* tsh_load with .broadcast and .cache: what a rank has kept is not sent again, in any grid; files
 * that changed are; and every tensor has the values that it has without a cache. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/files.h"
#include "../support/logs.h"
#include <dirent.h>
#include <time.h>
#include <utime.h>

enum { WIDTH = 24, INNER = 42, WORDS = 50, RANKS = 4, NONE = -1 };

/* ------------------------------------------------------------------------ a hash */

/* Four interleaved FNV-1a hashes: good enough where nobody looks for collisions. */
static void lanes_begin(void *state) {
    uint64_t *lane = (uint64_t *)state;
    for (int i = 0; i < 5; i++) lane[i] = 0xcbf29ce484222325u + (uint64_t)i;
    lane[4] = 0; /* number of bytes */
}

static void lanes_add(void *state, const void *bytes, size_t count) {
    uint64_t *lane = (uint64_t *)state;
    const unsigned char *at = (const unsigned char *)bytes;
    for (size_t i = 0; i < count; i++, lane[4]++)
        for (int k = 0; k < 4; k++)
            lane[k] = (lane[k] ^ (uint64_t)(at[i] + 256 * k)) * 0x100000001b3u;
}

static void lanes_end(void *state, unsigned char hash[32]) {
    memcpy(hash, state, 32);
}

static const tsh_hasher lanes = {5 * sizeof(uint64_t), lanes_begin, lanes_add, lanes_end};

/* ------------------------------------------------------------------------ folders */

static const char *cache_of(int rank) {
    static const char *const names[RANKS] = {"cache-0", "cache-1", "cache-2", "cache-3"};
    return names[rank];
}

/* Calls fn with the path of each file in a rank's cache; returns how many there are. */
static int each_kept(int rank, void (*fn)(const char *path)) {
    char path[4 * FILES_SIZE];
    DIR *folder = opendir(files_path(cache_of(rank)));
    struct dirent *entry;
    int count = 0;
    while (folder && (entry = readdir(folder))) {
        if (entry->d_name[0] == '.') continue;
        (void)snprintf(path, sizeof path, "%s/%s", files_path(cache_of(rank)), entry->d_name);
        if (fn) fn(path);
        count++;
    }
    if (folder) (void)closedir(folder);
    return count;
}

static void discard(const char *path) {
    (void)remove(path);
}

static void flip(const char *path) {
    FILE *file = fopen(path, "r+b");
    int byte;
    assert_non_null(file);
    byte = fgetc(file);
    rewind(file);
    assert_true(byte != EOF && fputc(byte ^ 4, file) != EOF && fclose(file) == 0);
}

static void lengthen(const char *path) {
    FILE *file = fopen(path, "ab");
    assert_true(file && fputc(0, file) == 0 && fclose(file) == 0);
}

static void cut(const char *path) {
    assert_int_equal(truncate(path, 3), 0);
}

/* Waits until the model's file did not change for two seconds: only then are hashes kept. */
static void settle(void) {
    const struct timespec pause = {0, 50000000};
    struct stat info;
    for (int i = 0; i < 200; i++) {
        assert_int_equal(stat(files_path("model"), &info), 0);
        if (time(NULL) - info.st_ctime >= 2) return;
        (void)nanosleep(&pause, NULL);
    }
    fail_msg("the time of a file does not pass");
}

/* Changes the last value of the model's file in place, and sets the file's time back. */
static void rewrite(void) {
    struct stat info;
    struct utimbuf times;
    FILE *file = fopen(files_path("model"), "r+b");
    int byte;
    assert_true(file && stat(files_path("model"), &info) == 0);
    assert_true(fseek(file, -2, SEEK_END) == 0 && (byte = fgetc(file)) != EOF);
    assert_true(fseek(file, -2, SEEK_END) == 0 && fputc(byte + 1, file) != EOF);
    assert_int_equal(fclose(file), 0);
    times.actime = times.modtime = info.st_mtime;
    assert_int_equal(utime(files_path("model"), &times), 0);
}

/* ------------------------------------------------------------------------ models */

static tsh_tensor *first(tsh_ctx *ctx, int micro_batch, void *user) {
    (void)micro_batch, (void)user;
    return tsh_ones(ctx, tsh_shape2(1, WIDTH));
}

static tsh_tensor *last(tsh_ctx *ctx, tsh_tensor *output, int micro_batch, void *user) {
    (void)ctx, (void)micro_batch, (void)user;
    return tsh_mean(output, -1, 0);
}

/* Tensors along rows, along columns and replicated, dealt to stages if there are any. */
static void build(tsh_ctx *ctx) {
    const tsh_embedding_desc words = {.count = WORDS, .dim = WIDTH, .style = TSH_ROWWISE};
    const tsh_linear_desc up = {.in = WIDTH, .out = INNER, .style = TSH_COLWISE};
    const tsh_linear_desc down = {.in = INNER, .out = WIDTH, .style = TSH_ROWWISE};
    const tsh_rms_norm_desc norm = {.dim = WIDTH};
    tsh_module *h = tsh_add_module(tsh_root(ctx), "h", NULL);
    tsh_add_embedding(tsh_root(ctx), "words", &words);
    for (int i = 0; i < 2; i++) {
        const char name[2] = {(char)('0' + i), 0};
        tsh_module *block = tsh_add_module(h, name, NULL);
        tsh_add_rms_norm(block, "norm", &norm);
        tsh_add_linear(block, "up", &up);
        tsh_add_linear(block, "down", &down);
    }
    if (tsh_pp(ctx)->size > 1) {
        const tsh_pipeline_desc d = {.micro_batches = 2, .input = first, .loss = last};
        (void)tsh_pipeline_new(h, &d);
    }
}

static int saves(tsh_ctx *ctx, void *user) {
    build(ctx);
    (void)user;
    CHECK(tsh_save(tsh_root(ctx), files_path("model"), NULL) == TSH_OK, "save");
    return 0;
}

/* A load: which ranks have a cache, and what is sent. */
typedef struct load {
    int without;           /* this rank has none; NONE: all have */
    int nowhere;           /* 1: the folders of all but rank 0 do not exist */
    uint64_t stamp;        /* not 0: rank 0 has a reader, of this .stamp */
    uint64_t sent, spread; /* found: messages of rank 0; broadcasts over tp and dp */
} load;

typedef struct hashes {
    tsh_ctx *ctx;
    uint64_t sum;
} hashes;

static void hash_one(const char *path, tsh_tensor *t, void *user) {
    hashes *h = (hashes *)user;
    (void)path;
    h->sum = h->sum * 31 + tsh_hash(h->ctx, t);
}

static int64_t read_model(int64_t at, void *to, int64_t bytes, void *user) {
    FILE *file = (FILE *)user;
    return fseek(file, (long)at, SEEK_SET) == 0 ? (int64_t)fread(to, 1, (size_t)bytes, file) : -1;
}

static int loads(tsh_ctx *ctx, void *user) {
    load *l = (load *)user;
    tsh_comm *world = tsh_world(ctx), *tp = tsh_tp(ctx), *dp = tsh_dp(ctx);
    const int rank = world->rank;
    tsh_file_desc desc = {.broadcast = 1, .hasher = &lanes};
    hashes want = {ctx, 0}, got = {ctx, 0};
    uint64_t sent, spread;
    tsh_result result;
    build(ctx);
    CHECK(tsh_load(tsh_root(ctx), files_path("model"), NULL) == TSH_OK, "plain");
    tsh_each_param(tsh_root(ctx), hash_one, &want);
    if (l->stamp) {
        desc.read_at = read_model;
        desc.user = fopen(files_path("model"), "rb");
        desc.stamp = l->stamp;
        CHECK(desc.user, "file");
    }
    if (rank != l->without)
        desc.cache = l->nowhere && rank ? "/dev/null/nowhere" : files_path(cache_of(rank));
    sent = world->stats.calls[TSH_SEND];
    spread = tp->stats.calls[TSH_BROADCAST] + dp->stats.calls[TSH_BROADCAST];
    CHECK(tsh_reset_parameters(tsh_root(ctx)) == TSH_OK, "reset");
    result = tsh_load_with(tsh_root(ctx), files_path("model"), NULL, &desc);
    if (desc.user) (void)fclose((FILE *)desc.user);
    CHECK(result == TSH_OK, "%s", tsh_last_error(ctx)->message);
    sent = world->stats.calls[TSH_SEND] - sent;
    spread = tp->stats.calls[TSH_BROADCAST] + dp->stats.calls[TSH_BROADCAST] - spread;
    tsh_each_param(tsh_root(ctx), hash_one, &got);
    CHECK(got.sum == want.sum, "other values");
    if (rank == 0) l->sent = sent;
    if (rank == 0) l->spread = spread;
    return 0;
}

static load run(int ranks, const tsh_desc *desc, int without) {
    load l = {without, 0, 0, 0, 0};
    ranks_run_with(ranks, desc, loads, &l);
    return l;
}

/* ------------------------------------------------------------------------ tests */

static const struct grid {
    int ranks;
    tsh_desc desc;
} grids[] = {{2, {.tp = 2}},          {3, {.tp = 3}},          {4, {.tp = 2}}, {2, {.tp = 1}},
             {4, {.tp = 2, .pp = 2}}, {2, {.tp = 1, .pp = 2}}, {1, {.tp = 1}}};

static int begin(void **state) {
    (void)state;
    for (int r = 0; r < RANKS; r++) files_folder(cache_of(r));
    ranks_run(1, saves, NULL);
    return 0;
}

static int end(void **state) {
    for (int r = 0; r < RANKS; r++) (void)each_kept(r, discard);
    return files_after(state);
}

static void what_is_kept_is_not_sent(void **state) {
    (void)state;
    for (int g = 0; g < COUNT(grids); g++) {
        const int ranks = grids[g].ranks;
        load first = run(ranks, &grids[g].desc, NONE), again = run(ranks, &grids[g].desc, NONE);
        if (ranks > 1 && g == 0) assert_true(first.sent > 0 && first.spread > 0);
        assert_int_equal(again.sent, 0);
        assert_int_equal(again.spread, 0);
    }
}

static void files_that_changed_are_sent_again(void **state) {
    static void (*const changes[])(const char *) = {flip, lengthen, cut, discard};
    const tsh_desc desc = {.tp = 2};
    load l;
    int kept;
    uint64_t all;
    (void)state;
    settle();
    l = run(2, &desc, NONE);
    all = l.sent;
    kept = each_kept(1, NULL);
    assert_true(all > 0 && kept > 0);
    assert_int_equal(each_kept(0, NULL), 1);
    for (int c = 0; c < COUNT(changes); c++) {
        (void)each_kept(1, changes[c]);
        l = run(2, &desc, NONE);
        assert_int_equal(l.sent, all); /* all of rank 1's files have changed */
        l = run(2, &desc, NONE);
        assert_int_equal(l.sent, 0);
        assert_int_equal(each_kept(1, NULL), kept);
        (void)each_kept(0, changes[c]); /* rank 0's hashes: it finds them again */
        l = run(2, &desc, NONE);
        assert_int_equal(l.sent, 0);
    }
    ranks_run(1, saves, NULL); /* the same values in a new file */
    assert_int_equal(run(2, &desc, NONE).sent, 0);
}

static int moved(load l) {
    return l.sent > 0 || l.spread > 0;
}

/* A second in which a file is written twice has one time: hashes would be those of the first. */
static void hashes_are_kept_of_files_that_have_settled(void **state) {
    const tsh_desc desc = {.tp = 2};
    (void)state;
    (void)run(2, &desc, NONE);
    rewrite();
    assert_true(moved(run(2, &desc, NONE)));
    assert_int_equal(each_kept(0, NULL), 0);
    settle();
    assert_false(moved(run(2, &desc, NONE)));
    assert_int_equal(each_kept(0, NULL), 1);
    rewrite();
    assert_true(moved(run(2, &desc, NONE)));
    assert_int_equal(each_kept(0, NULL), 1);
}

static void a_stamp_that_stays_is_an_error(void **state) {
    const tsh_desc desc = {.tp = 2};
    load l = {NONE, 0, 5, 0, 0};
    const char *why;
    (void)state;
    ranks_run_with(2, &desc, loads, &l);
    assert_int_equal(each_kept(0, NULL), 1);
    rewrite();
    (void)each_kept(1, discard);
    assert_true(ranks_try(2, &desc, loads, &l, &why));
    assert_non_null(strstr(why, "rank 0 has sent rank 1 a shard of \""));
    assert_non_null(strstr(why, "remove the files \"hashes-*\" in the .cache of rank 0"));
    (void)each_kept(0, discard);
    ranks_run_with(2, &desc, loads, &l);
}

static void another_model_of_the_same_names_is_sent(void **state) {
    const tsh_desc desc = {.tp = 2}, other = {.seed = 7};
    const uint64_t all = run(2, &desc, NONE).sent;
    load l;
    (void)state;
    ranks_run_with(1, &other, saves, NULL);
    l = run(2, &desc, NONE);
    assert_true(l.sent > 0 && l.sent <= all); /* biases, which are 0, and norms are the same */
    assert_int_equal(run(2, &desc, NONE).sent, 0);
}

static void ranks_without_a_cache_are_sent_theirs(void **state) {
    const tsh_desc two = {.tp = 2};
    const uint64_t all = run(2, &two, NONE).sent;
    (void)state;
    assert_int_equal(run(2, &two, 1).sent, all);
    assert_int_equal(run(2, &two, 0).sent, all); /* rank 0 knows no hashes */
    assert_int_equal(run(2, &two, NONE).sent, 0);
    (void)run(4, &two, NONE);
    for (int r = 0; r < 4; r++) (void)run(4, &two, r);
    assert_int_equal(run(4, &two, NONE).sent, 0);
}

static void a_folder_that_takes_nothing_is_logged(void **state) {
    static log_lines lines;
    const tsh_desc desc = {.tp = 2, .logger = {log_keep, &lines}};
    load l = {NONE, 1, 0, 0, 0};
    (void)state;
    lines.count = 0;
    ranks_run_with(2, &desc, loads, &l);
    assert_int_equal(lines.count, 1);
    assert_non_null(strstr(lines.line[0], "rank 1 cannot keep \""));
    assert_non_null(strstr(lines.line[0], "\" in \"/dev/null/nowhere\" (Not a directory)"));
}

static int lacks_a_hasher(tsh_ctx *ctx, void *user) {
    const tsh_file_desc desc = {.broadcast = 1, .cache = "x"};
    (void)user;
    build(ctx);
    CHECK(tsh_load_with(tsh_root(ctx), files_path("model"), NULL, &desc) == TSH_ERR_ARGUMENT,
          "refused");
    CHECK(ranks_says(ctx, TSH_ERR_ARGUMENT, ".cache \"x\" needs a .hasher"), "says so");
    return 0;
}

static void a_cache_needs_a_hasher(void **state) {
    (void)state;
    ranks_run(2, lacks_a_hasher, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_is_kept_is_not_sent, begin, end),
        cmocka_unit_test_setup_teardown(files_that_changed_are_sent_again, begin, end),
        cmocka_unit_test_setup_teardown(hashes_are_kept_of_files_that_have_settled, begin, end),
        cmocka_unit_test_setup_teardown(a_stamp_that_stays_is_an_error, begin, end),
        cmocka_unit_test_setup_teardown(another_model_of_the_same_names_is_sent, begin, end),
        cmocka_unit_test_setup_teardown(ranks_without_a_cache_are_sent_theirs, begin, end),
        cmocka_unit_test_setup_teardown(a_folder_that_takes_nothing_is_logged, begin, end),
        cmocka_unit_test_setup_teardown(a_cache_needs_a_hasher, begin, end),
    };
    return cmocka_run_group_tests_name("load_cache", tests, files_begin, files_end);
}
