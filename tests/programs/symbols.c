/* symbols LIBRARY: looks up each name of standard input in it and says those that it doesn't find, then how many it did. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int count, char **words) {
    void *library = count == 2 ? dlopen(words[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) {
        fprintf(stderr, "symbols: %s\n", count == 2 ? dlerror() : "symbols LIBRARY");
        return 1;
    }
    char name[256];
    int found = 0;
    while (fgets(name, sizeof name, stdin)) {
        name[strcspn(name, "\n")] = 0;
        if (dlsym(library, name)) found++;
        else printf("missing %s\n", name);
    }
    printf("found %d\n", found);
    return 0;
}
