/* An MPI library that is none of the known ones. */
#include <string.h>

int PMPI_Init(int *argc, char ***argv) { (void)argc, (void)argv; return 0; }
int MPI_Init(int *argc, char ***argv) { return PMPI_Init(argc, argv); }
int PMPI_Finalize(void) { return 0; }
int MPI_Finalize(void) { return PMPI_Finalize(); }
int PMPI_Get_library_version(char *version, int *length) {
    strcpy(version, VERSION);
    *length = (int)strlen(version);
    return 0;
}
