// Copies many pieces of memory in one call: see `copying.py`.

#include <stdint.h>
#include <string.h>

// `count` pieces of `size` bytes each, piece i from `source + from_at[i]` to `target + to_at[i]`. They do not overlap.
void tandem_copy_pieces(char *target, const char *source, const int64_t *to_at, const int64_t *from_at, int64_t count,
                        int64_t size) {
    for (int64_t i = 0; i < count; i++) memcpy(target + to_at[i], source + from_at[i], (size_t)size);
}
