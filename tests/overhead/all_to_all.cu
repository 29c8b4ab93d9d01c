// What it takes every one of N GPUs to read a piece from each of the others at once, one process a GPU (CUDA IPC), by ways to launch.
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <algorithm>
#include <random>
#include <chrono>
#include <atomic>
#include <cstring>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#define C(x) do{cudaError_t e_=(x); if(e_){fprintf(stderr,"%s: %s\n",#x,cudaGetErrorString(e_));_exit(1);} }while(0)
#define D(x) do{CUresult e_=(x); if(e_){fprintf(stderr,"%s: %d\n",#x,(int)e_);_exit(1);} }while(0)
static double now(){ return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count()*1e6; }
const int N=4, ROUNDS=300; const size_t MAX=16<<20;
struct Sh { std::atomic<int> count, gen; cudaIpcMemHandle_t h[N], d[N]; double t[N][ROUNDS+50], l[N][ROUNDS+50]; };
static Sh* sh;
static void barrier(){ int g=sh->gen.load(); if(sh->count.fetch_add(1)==N-1){ sh->count.store(0); sh->gen.fetch_add(1);} else while(sh->gen.load()==g) __builtin_ia32_pause(); }
int child(int me){
  C(cudaSetDevice(me)); C(cudaFree(0));
  char *src,*dst; C(cudaMalloc(&src,MAX*N)); C(cudaMalloc(&dst,MAX*N));
  std::mt19937_64 rng(std::random_device{}()); std::vector<unsigned long long> host(MAX*N/8); for(auto&x:host)x=rng();
  C(cudaMemcpy(src,host.data(),MAX*N,cudaMemcpyHostToDevice)); C(cudaDeviceSynchronize());
  C(cudaIpcGetMemHandle(&sh->h[me],src)); C(cudaIpcGetMemHandle(&sh->d[me],dst));
  barrier();
  char* from[N]; char* to[N];
  for(int p=0;p<N;p++) if(p!=me){ C(cudaIpcOpenMemHandle((void**)&from[p],sh->h[p],cudaIpcMemLazyEnablePeerAccess)); C(cudaIpcOpenMemHandle((void**)&to[p],sh->d[p],cudaIpcMemLazyEnablePeerAccess)); }
  cudaStream_t s[N]; cudaEvent_t e[N]; for(int i=0;i<N;i++){ C(cudaStreamCreateWithFlags(&s[i],cudaStreamNonBlocking)); C(cudaEventCreateWithFlags(&e[i],cudaEventDisableTiming)); }
  auto batch=[&](std::vector<CUdeviceptr>&d,std::vector<CUdeviceptr>&f,std::vector<size_t>&z,cudaStream_t st,CUmemcpySrcAccessOrder source=CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,unsigned flags=0){
    CUmemcpyAttributes a; memset(&a,0,sizeof a); a.srcAccessOrder=source; a.flags=flags; size_t idx=0;
#if CUDA_VERSION >= 13000
    D(cuMemcpyBatchAsync(d.data(),f.data(),z.data(),d.size(),&a,&idx,1,st));
#else
    size_t fail; D(cuMemcpyBatchAsync(d.data(),f.data(),z.data(),d.size(),&a,&idx,1,&fail,st));
#endif
  };
  cudaStream_t urgent; { int least,most; C(cudaDeviceGetStreamPriorityRange(&least,&most)); C(cudaStreamCreateWithPriority(&urgent,cudaStreamNonBlocking,most)); }
  // One batch; a stream each; one stream; two and one, on two streams; one and two; written instead of read; all begin with the same;
  // a batch whose sources may be read in any order, that is to overlap with kernels, of a stream of high priority, with an event behind
  // it; a graph, of copies without order, and one after the other.
  const char* names[]={"batch","streams","one stream","2+1","1+2","pushed batch","pushed streams","in rank order","in halves","streams in rank order","any order","overlap","urgent","event","graph","graph in order"};
  const int MODES=16;
  for(size_t z: {(size_t)4096,(size_t)65536,(size_t)262144,(size_t)393216,(size_t)524288,(size_t)786432,(size_t)1048576,(size_t)1572864,(size_t)2097152,(size_t)4194304,(size_t)16777216}){
    cudaGraphExec_t exec[2];
    for(int g=0;g<2;g++){ cudaGraph_t graph; C(cudaGraphCreate(&graph,0)); cudaGraphNode_t before; for(int k=1;k<N;k++){ int p=(me+k)%N; int n=g&&k>1; cudaGraphNode_t node; C(cudaGraphAddMemcpyNode1D(&node,graph,n?&before:nullptr,n,dst+MAX*p,from[p]+MAX*me,z,cudaMemcpyDeviceToDevice)); before=node; } C(cudaGraphInstantiate(&exec[g],graph,0)); C(cudaGraphUpload(exec[g],s[0])); C(cudaStreamSynchronize(s[0])); }
    std::vector<std::vector<double>> all(MODES), lat(MODES);
    for(int rep=0;rep<3;rep++) for(int m=0;m<MODES;m++){
      for(int r=0;r<ROUNDS/3+10;r++){
        std::vector<int> order; for(int k=1;k<N;k++) order.push_back((me+k)%N);
        if(m==7||m==9) { order.clear(); for(int p=0;p<N;p++) if(p!=me) order.push_back(p); }
        std::vector<CUdeviceptr> d,f; std::vector<size_t> zz;
        bool push=(m==5||m==6);
        for(int p:order){ if(push){ d.push_back((CUdeviceptr)(to[p]+MAX*me)); f.push_back((CUdeviceptr)(src+MAX*p)); } else { d.push_back((CUdeviceptr)(dst+MAX*p)); f.push_back((CUdeviceptr)(from[p]+MAX*me)); } zz.push_back(z); }
        barrier();
        double t0=now(); int ns=1;
        if(m==0||m==5||m==7) batch(d,f,zz,s[0]);
        else if(m==1||m==6||m==9){ for(int i=0;i<3;i++) C(cudaMemcpyAsync((void*)d[i],(void*)f[i],z,cudaMemcpyDeviceToDevice,s[i])); ns=3; }
        else if(m==2) for(int i=0;i<3;i++) C(cudaMemcpyAsync((void*)d[i],(void*)f[i],z,cudaMemcpyDeviceToDevice,s[0]));
        else if(m==3){ std::vector<CUdeviceptr> d2(d.begin(),d.begin()+2),f2(f.begin(),f.begin()+2); std::vector<size_t> z2(2,z); batch(d2,f2,z2,s[0]); C(cudaMemcpyAsync((void*)d[2],(void*)f[2],z,cudaMemcpyDeviceToDevice,s[1])); ns=2; }
        else if(m==4){ C(cudaMemcpyAsync((void*)d[0],(void*)f[0],z,cudaMemcpyDeviceToDevice,s[0])); std::vector<CUdeviceptr> d2(d.begin()+1,d.end()),f2(f.begin()+1,f.end()); std::vector<size_t> z2(2,z); batch(d2,f2,z2,s[1]); ns=2; }
        else if(m==8){ std::vector<CUdeviceptr> d2,f2; std::vector<size_t> z2; for(int h=0;h<2;h++) for(int i=0;i<3;i++){ d2.push_back(d[i]+h*z/2); f2.push_back(f[i]+h*z/2); z2.push_back(z/2);} batch(d2,f2,z2,s[0]); }
        else if(m==10) batch(d,f,zz,s[0],CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
        else if(m==11) batch(d,f,zz,s[0],CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
        else if(m==12) batch(d,f,zz,urgent);
        else if(m==13){ batch(d,f,zz,s[0]); C(cudaEventRecord(e[0],s[0])); }
        else if(m==14||m==15) C(cudaGraphLaunch(exec[m-14],s[0]));
        double t1=now();
        if(m==13) while(cudaEventQuery(e[0])==cudaErrorNotReady) ;
        else for(int i=0;i<ns;i++) while(cudaStreamQuery(m==12?urgent:s[i])==cudaErrorNotReady) ;
        double t2=now();
        sh->t[me][r]=t2-t0; sh->l[me][r]=t1-t0;
        barrier();
        if(me==0&&r>=10){ double mx=0,ml=0; for(int p=0;p<N;p++){ mx=std::max(mx,sh->t[p][r]); ml+=sh->l[p][r]/N; } all[m].push_back(mx); lat[m].push_back(ml); }
      }
    }
    if(me==0){ printf("%zu bytes, us until all are done: median (10th percentile, launching)\n       ",z); for(int m=0;m<MODES;m++){ auto&v=all[m]; std::sort(v.begin(),v.end()); auto&w=lat[m]; std::sort(w.begin(),w.end()); printf("  %s %.2f (%.2f, calls %.2f)",names[m],v[v.size()/2],v[v.size()/10],w[w.size()/2]); } puts(""); fflush(stdout); }
  }
  // The data of one batch.
  std::vector<unsigned long long> back(MAX*N/8), theirs(MAX*N/8);
  C(cudaMemset(dst,0xEE,MAX*N)); C(cudaDeviceSynchronize()); barrier();
  std::vector<CUdeviceptr> d,f; std::vector<size_t> zz; for(int k=1;k<N;k++){ int p=(me+k)%N; d.push_back((CUdeviceptr)(dst+MAX*p)); f.push_back((CUdeviceptr)(from[p]+MAX*me)); zz.push_back(MAX); }
  batch(d,f,zz,s[0]); C(cudaStreamSynchronize(s[0])); C(cudaMemcpy(back.data(),dst,MAX*N,cudaMemcpyDeviceToHost));
  bool ok=true; for(int p=0;p<N;p++) if(p!=me){ C(cudaMemcpy(theirs.data(),from[p],MAX*N,cudaMemcpyDeviceToHost)); ok&=!memcmp((char*)theirs.data()+MAX*me,(char*)back.data()+MAX*p,MAX); }
  printf("rank %d: %s\n",me,ok?"verified":"WRONG"); fflush(stdout); barrier(); return !ok;
}
int main(){ sh=(Sh*)mmap(0,sizeof(Sh),PROT_READ|PROT_WRITE,MAP_SHARED|MAP_ANONYMOUS,-1,0); for(int i=0;i<N;i++){ if(!fork()) _exit(child(i)); } int rc=0,st; while(wait(&st)>0) rc|=st; return rc!=0; }
