// Times MPI collectives: op bytes... ; median over iterations of the slowest rank's time.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int cmp(const void*a,const void*b){double x=*(double*)a,y=*(double*)b;return (x>y)-(x<y);}
int main(int c,char**v){MPI_Init(&c,&v);int r,w;MPI_Comm_rank(MPI_COMM_WORLD,&r);MPI_Comm_size(MPI_COMM_WORLD,&w);const char*op=v[1];
for(int k=2;k<c;k++){size_t n=atol(v[k]);size_t e=n/4;float*a=malloc(n*(w)+64),*b=malloc(n*(w)+64);memset(a,0,n*w);memset(b,0,n*w);
 double t[4000];int it=0;double start=MPI_Wtime();int go=1;
 while(go){MPI_Barrier(MPI_COMM_WORLD);double s=MPI_Wtime();
  if(!strcmp(op,"all-reduce"))MPI_Allreduce(MPI_IN_PLACE,a,e,MPI_FLOAT,MPI_SUM,MPI_COMM_WORLD);
  else if(!strcmp(op,"broadcast"))MPI_Bcast(a,e,MPI_FLOAT,0,MPI_COMM_WORLD);
  else if(!strcmp(op,"all-gather"))MPI_Allgather(a,e/w,MPI_FLOAT,b,e/w,MPI_FLOAT,MPI_COMM_WORLD);
  else if(!strcmp(op,"reduce-scatter"))MPI_Reduce_scatter_block(a,b,e/w,MPI_FLOAT,MPI_SUM,MPI_COMM_WORLD);
  else if(!strcmp(op,"all-to-all"))MPI_Alltoall(a,e/w,MPI_FLOAT,b,e/w,MPI_FLOAT,MPI_COMM_WORLD);
  else MPI_Barrier(MPI_COMM_WORLD);
  double d=MPI_Wtime()-s,m;MPI_Allreduce(&d,&m,1,MPI_DOUBLE,MPI_MAX,MPI_COMM_WORLD);t[it++]=m;
  go=it<4000&&(it<20||MPI_Wtime()-start<1.0);MPI_Bcast(&go,1,MPI_INT,0,MPI_COMM_WORLD);}
 qsort(t,it,sizeof*t,cmp);if(!r)printf("%s %d ranks %zu B: %.1f us\n",op,w,n,t[it/2]*1e6);free(a);free(b);}
MPI_Finalize();}
