/* Every seed of fuzz_gguf.c once, whole and cut. */
#include "fuzz_gguf.c"
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static void every_seed_is_answered(void **state) {
    static uint8_t data[8192];
    const char *here = __FILE__, *slash = strrchr(here, '/');
    char path[512], file_path[1024], error[512];
    struct dirent *entry;
    size_t size, cut;
    int count = 0, read = 0;
    DIR *folder;
    (void)state;
    (void)snprintf(path, sizeof path, "%.*sgguf", slash ? (int)(slash - here + 1) : 0, here);
    folder = opendir(path);
    if (!folder) fail_msg("%s cannot be opened", path);
    while ((entry = readdir(folder)) != NULL) {
        gguf *g;
        FILE *file;
        if (entry->d_name[0] == '.') continue;
        (void)snprintf(file_path, sizeof file_path, "%s/%s", path, entry->d_name);
        file = fopen(file_path, "rb");
        assert_non_null(file);
        size = fread(data, 1, sizeof data, file);
        (void)fclose(file);
        g = gguf_read(data, size, entry->d_name, error, sizeof error);
        read += g != NULL;
        if (strncmp(entry->d_name, "good_", 5) == 0 && !g) fail_msg("%s", error);
        gguf_close(g);
        for (cut = 0; cut <= size; cut += cut + 64 < size ? 64 : 1)
            assert_int_equal(LLVMFuzzerTestOneInput(data, cut), 0);
        count++;
    }
    (void)closedir(folder);
    assert_true(count >= 12 && read >= 6 && read < count);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_seed_is_answered)};
    return cmocka_run_group_tests_name("fuzz seeds", tests, NULL, NULL);
}
