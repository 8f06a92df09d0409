/* Every seed of fuzz_config.c once: all of them are configs. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* opendir */
#endif
#include "fuzz_config.c"
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static void every_seed_is_taken(void **state) {
    static uint8_t data[4096];
    const char *here = __FILE__, *slash = strrchr(here, '/');
    char path[512], file_path[1024];
    struct dirent *entry;
    size_t size;
    int count = 0;
    DIR *folder;
    (void)state;
    (void)snprintf(path, sizeof path, "%.*sconfig", slash ? (int)(slash - here + 1) : 0, here);
    folder = opendir(path);
    if (!folder) fail_msg("%s cannot be opened", path);
    while ((entry = readdir(folder)) != NULL) {
        FILE *file;
        if (entry->d_name[0] == '.') continue;
        (void)snprintf(file_path, sizeof file_path, "%s/%s", path, entry->d_name);
        file = fopen(file_path, "rb");
        assert_non_null(file);
        size = fread(data, 1, sizeof data, file);
        (void)fclose(file);
        if (!config_take(data, size)) fail_msg("%s is refused", entry->d_name);
        assert_int_equal(config_take(data, size / 2), 0);
        count++;
    }
    (void)closedir(folder);
    assert_true(count >= 37);
    assert_int_equal(config_take(data, 0), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_seed_is_taken)};
    return cmocka_run_group_tests_name("fuzz seeds", tests, NULL, NULL);
}
