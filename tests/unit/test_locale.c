/* What is printed has a decimal point in every locale: errors, tables, groups, tensors, traces. The
 * locale with a comma is written by this test, in the form that glibc reads. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"
#include "../support/files.h"
#include <locale.h>

/* LC_NUMERIC of glibc's C.UTF-8, with commas: a magic number, how many values, where each begins;
 * decimal point, separator and groups of thousands, the first two once more as wide characters, the
 * character set. */
static const char comma[] = "\x14\x11\x03\x20" "\6\0\0\0"
                            "\x20\0\0\0" "\x22\0\0\0" "\x23\0\0\0"
                            "\x24\0\0\0" "\x28\0\0\0" "\x2C\0\0\0"
                            ",\0" "\0" "\0" ",\0\0\0" "\0\0\0\0" "UTF-8";

/* 1 if numbers now have a comma. */
static int use_comma(void) {
    char text[8];
    files_folder("xx_XX.UTF-8");
    files_write("xx_XX.UTF-8/LC_NUMERIC", comma, sizeof comma);
    if (setenv("LOCPATH", files_here, 1) != 0) return 0;
    if (!setlocale(LC_NUMERIC, "xx_XX.UTF-8") && !setlocale(LC_NUMERIC, "de_DE.UTF-8")) return 0;
    (void)snprintf(text, sizeof text, "%.1f", 0.5);
    return strcmp(text, "0,5") == 0;
}

typedef struct text {
    char at[1 << 16];
} text;

static void take(const char *message, void *user) {
    tsh_text_add(((text *)user)->at, sizeof(text), "%s\n", message);
}

static void read_file(FILE *file, text *out) {
    char line[512];
    rewind(file);
    while (fgets(line, sizeof line, file)) tsh_text_add(out->at, sizeof out->at, "%s", line);
    (void)fclose(file);
}

/* As tsh_text_add, by tsh_text_format. */
TSH_PRINTF(2, 3) static void put(text *out, const char *format, ...) {
    const size_t used = strlen(out->at);
    va_list list;
    va_start(list, format);
    tsh_text_format(out->at + used, sizeof out->at - used, format, list);
    va_end(list);
}

/* All that the library prints of numbers, as text. */
static void print_all(text *out) {
    static const float numbers[] = {0.25f, -1.5f, 1e-9f, 3};
    const tsh_linear_desc wide = {.in = 4, .out = 4};
    const tsh_optim_desc adam = {.kind = TSH_ADAMW, .lr = 0.125, .weight_decay = 0.75};
    FILE *file = tmpfile();
    char some[256];
    tsh_error error;
    tsh_desc desc;
    tsh_ctx *ctx = NULL;
    tsh_optim *optim;
    tsh_tensor *x, *y;
    memset(out, 0, sizeof *out);
    memset(&desc, 0, sizeof desc);
    desc.logger.log = take;
    desc.logger.user = out;
    assert_int_equal(tsh_open(&desc, &ctx), TSH_OK);
    (void)tsh_add_linear(tsh_root(ctx), "m", &wide);
    optim = tsh_optim_new(tsh_root(ctx), &adam);
    x = tsh_tensor_from(ctx, TSH_F32, tsh_shape2(1, 4), tsh_replicated(), numbers);
    assert_int_equal(tsh_profile(ctx, 1), TSH_OK);
    y = tsh_mean(tsh_mean(tsh_forward(tsh_root(ctx), x), 1, 0), 0, 0);
    assert_int_equal(tsh_backward(ctx, y), TSH_OK);
    (void)tsh_optim_step(optim);
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
    assert_int_equal(tsh_profile(ctx, 0), TSH_OK);
    assert_int_equal(tsh_summary(tsh_root(ctx), file), TSH_OK);
    read_file(file, out);
    tsh_text_add(out->at, sizeof out->at, "%s\n", tsh_to_string(x, some, sizeof some));
    assert_null(tsh_dropout(x, 1.5, NULL));
    tsh_text_add(out->at, sizeof out->at, "%s\n", tsh_last_error(ctx)->message);
    tsh_clear_error(ctx);
    (void)tsh_error_set(&error, TSH_ERR_IO, 3, "%5.2f, %-8.1e|%+g%% of %*d, %s", 1.25, 1.5, -0.5, 4,
                        7, "a,b");
    put(out, "%s\n%Lg, %d;%.3f\n", error.message, 2.5L, 1, 2.0);
    tsh_close(ctx);
}

static int is_digit(char c) {
    return c >= '0' && c <= '9';
}

static void numbers_have_points(void **state) {
    static const char *const parts[] = {
        "profile of rank 0", " ms", "GB/s", "lr 0.125, weight decay 0.75", " 0.25 -1.5 1e-09 3",
        "tsh_dropout: p is 1.5, not", " 1.25, 1.5e+00 |-0.5% of    7, a,b\n2.5, 1;2.000\n"};
    static text out;
    int i;
    (void)state;
    if (!use_comma()) {
        print_message("skip: no locale with a comma can be made\n");
        skip();
    }
    print_all(&out);
    (void)setlocale(LC_NUMERIC, "C");
    for (i = 0; i < COUNT(parts); i++)
        if (!strstr(out.at, parts[i])) fail_msg("no \"%s\" in:\n%s", parts[i], out.at);
    for (i = 1; out.at[i]; i++)
        if (out.at[i] == ',' && is_digit(out.at[i - 1]) && is_digit(out.at[i + 1]))
            fail_msg("a comma: ...%.60s", out.at + (i < 20 ? 0 : i - 20));
}

static int remove_locale(void **state) {
    (void)remove(files_path("xx_XX.UTF-8/LC_NUMERIC"));
    return files_after(state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(numbers_have_points, remove_locale),
    };
    return cmocka_run_group_tests_name("locale", tests, files_begin, files_end);
}
