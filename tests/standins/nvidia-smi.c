#include <stdio.h>
struct machine_gpu { const char *uuid, *pci; unsigned instances; struct { const char *uuid; unsigned gi, ci; } mig[8]; };
#include "machine.h"
int main(void) {
    printf("NVIDIA-SMI %s (simulated)\n", DRIVER);
    for (const struct machine_gpu *gpu = machine; gpu->uuid; gpu++)
        printf("GPU %d: simulated (UUID: %s)\n", (int)(gpu - machine), gpu->uuid);
    return 0;
}
