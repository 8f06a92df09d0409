/* Every seed of fuzz_tokenizer.c once: all of them are tokenizers. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* opendir */
#endif
#include "fuzz_tokenizer.c"
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static void every_seed_is_read(void **state) {
    static uint8_t data[8192];
    const char *here = __FILE__, *slash = strrchr(here, '/');
    char path[512], file_path[1024], error[256];
    struct dirent *entry;
    size_t size, json;
    int count = 0;
    DIR *folder;
    (void)state;
    (void)snprintf(path, sizeof path, "%.*stokenizer", slash ? (int)(slash - here + 1) : 0, here);
    folder = opendir(path);
    if (!folder) fail_msg("%s cannot be opened", path);
    while ((entry = readdir(folder)) != NULL) {
        llm_tokenizer *t;
        FILE *file;
        if (entry->d_name[0] == '.') continue;
        (void)snprintf(file_path, sizeof file_path, "%s/%s", path, entry->d_name);
        file = fopen(file_path, "rb");
        assert_non_null(file);
        size = fread(data, 1, sizeof data, file);
        (void)fclose(file);
        json = (size_t)((const uint8_t *)memchr(data, 0xFF, size) - data);
        t = llm_tokenizer_read((const char *)data, json, entry->d_name, error, sizeof error);
        if (!t) fail_msg("%s", error);
        llm_tokenizer_free(t);
        assert_int_equal(LLVMFuzzerTestOneInput(data, size), 0);
        assert_int_equal(LLVMFuzzerTestOneInput(data, size / 2), 0);
        count++;
    }
    (void)closedir(folder);
    assert_true(count >= 20);
    assert_int_equal(LLVMFuzzerTestOneInput(data, 0), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_seed_is_read)};
    return cmocka_run_group_tests_name("fuzz seeds", tests, NULL, NULL);
}
