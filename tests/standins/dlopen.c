/* Loads libraries by name, for images whose C library isn't glibc: prints each name, and whether it was found. */
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **names) {
    for (int i = 1; i < count; i++)
        printf("%s %s\n", names[i], dlopen(names[i], RTLD_NOW) ? "found" : dlerror());
    return 0;
}
