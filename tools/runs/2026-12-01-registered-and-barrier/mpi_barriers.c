#include <mpi.h>
#include <stdio.h>
int main(int c,char**v){MPI_Init(&c,&v);int r,w;MPI_Comm_rank(MPI_COMM_WORLD,&r);MPI_Comm_size(MPI_COMM_WORLD,&w);for(int k=0;k<4;k++){double b=MPI_Wtime();for(int i=0;i<20000;i++)MPI_Barrier(MPI_COMM_WORLD);double e=(MPI_Wtime()-b)/20000*1e6;if(!r&&k)printf("%.2f ",e);}if(!r)printf("chain of mpi, %d ranks\n",w);MPI_Finalize();}
