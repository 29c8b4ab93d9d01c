// What it takes every one of N GPUs to read W pieces from each of the others, one process a GPU (CUDA IPC), by ways to launch, where the ranks
// begin up to `skew` us apart.
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
const int N=4, W=4, ROUNDS=240; const size_t MAX=4<<20;
struct Sh { std::atomic<int> count, gen; cudaIpcMemHandle_t h[N]; double t0[N][ROUNDS], t2[N][ROUNDS]; };
static Sh* sh;
static void barrier(){ int g=sh->gen.load(); if(sh->count.fetch_add(1)==N-1){ sh->count.store(0); sh->gen.fetch_add(1);} else while(sh->gen.load()==g) __builtin_ia32_pause(); }
int child(int me){
  C(cudaSetDevice(me)); C(cudaFree(0));
  char *src,*dst; C(cudaMalloc(&src,MAX*N*W)); C(cudaMalloc(&dst,MAX*N*W));
  std::mt19937_64 rng(std::random_device{}()); std::vector<unsigned long long> host(MAX*N*W/8); for(auto&x:host)x=rng();
  C(cudaMemcpy(src,host.data(),MAX*N*W,cudaMemcpyHostToDevice)); C(cudaDeviceSynchronize());
  C(cudaIpcGetMemHandle(&sh->h[me],src));
  barrier();
  char* from[N];
  for(int p=0;p<N;p++) if(p!=me) C(cudaIpcOpenMemHandle((void**)&from[p],sh->h[p],cudaIpcMemLazyEnablePeerAccess));
  cudaStream_t s[N]; cudaEvent_t e[16]; for(int i=0;i<N;i++) C(cudaStreamCreateWithFlags(&s[i],cudaStreamNonBlocking)); for(auto&x:e) C(cudaEventCreateWithFlags(&x,cudaEventDisableTiming));
  struct B{ std::vector<CUdeviceptr> d,f; std::vector<size_t> z; void add(char*a,char*b,size_t n){ d.push_back((CUdeviceptr)a); f.push_back((CUdeviceptr)b); z.push_back(n);} };
  auto batch=[&](B&b,cudaStream_t st){
    CUmemcpyAttributes a; memset(&a,0,sizeof a); a.srcAccessOrder=CU_MEMCPY_SRC_ACCESS_ORDER_STREAM; size_t idx=0;
#if CUDA_VERSION >= 13000
    D(cuMemcpyBatchAsync(b.d.data(),b.f.data(),b.z.data(),b.d.size(),&a,&idx,1,st));
#else
    size_t fail; D(cuMemcpyBatchAsync(b.d.data(),b.f.data(),b.z.data(),b.d.size(),&a,&idx,1,&fail,st));
#endif
  };
  const char* names[]={"3 streams single","3 streams batch4","1 batch seq","1 stream 3 batches","1 batch interleaved","1 stream single","1 stream single interl","turns w/ events 2 streams","3 streams pair batches","turns by half-windows"};
  const int MODES=10;
  for(double skew: {0.,10.,25.}) for(size_t z: {(size_t)524288,(size_t)1048576,(size_t)1572864,(size_t)2097152,(size_t)2621440,(size_t)3145728,(size_t)4194304}){
    std::vector<std::vector<double>> all(MODES);
    for(int rep=0;rep<2;rep++) for(int m=0;m<MODES;m++){
      for(int r=0;r<50;r++){
        int ord[3]; for(int k=1;k<N;k++) ord[k-1]=(me+N-k)%N;
        auto D_=[&](int p,int w){ return dst+(p*W+w)*MAX; }; auto F_=[&](int p,int w){ return from[p]+(me*W+w)*MAX; };
        double wait=skew*(rng()%1000)/1000.;
        barrier();
        double b0=now(); while(now()-b0<wait) ;
        double t0=now(); bool used[N]={};
        if(m==0) for(int k=0;k<3;k++) for(int w=0;w<W;w++){ C(cudaMemcpyAsync(D_(ord[k],w),F_(ord[k],w),z,cudaMemcpyDeviceToDevice,s[k])); used[k]=true; }
        else if(m==1) for(int k=0;k<3;k++){ B b; for(int w=0;w<W;w++) b.add(D_(ord[k],w),F_(ord[k],w),z); batch(b,s[k]); used[k]=true; }
        else if(m==2){ B b; for(int k=0;k<3;k++) for(int w=0;w<W;w++) b.add(D_(ord[k],w),F_(ord[k],w),z); batch(b,s[0]); used[0]=true; }
        else if(m==3) for(int k=0;k<3;k++){ B b; for(int w=0;w<W;w++) b.add(D_(ord[k],w),F_(ord[k],w),z); batch(b,s[0]); used[0]=true; }
        else if(m==4){ B b; for(int w=0;w<W;w++) for(int k=0;k<3;k++) b.add(D_(ord[k],w),F_(ord[k],w),z); batch(b,s[0]); used[0]=true; }
        else if(m==5) for(int k=0;k<3;k++) for(int w=0;w<W;w++){ C(cudaMemcpyAsync(D_(ord[k],w),F_(ord[k],w),z,cudaMemcpyDeviceToDevice,s[0])); used[0]=true; }
        else if(m==6) for(int w=0;w<W;w++) for(int k=0;k<3;k++){ C(cudaMemcpyAsync(D_(ord[k],w),F_(ord[k],w),z,cudaMemcpyDeviceToDevice,s[0])); used[0]=true; }
        else if(m==7) for(int k=0;k<3;k++){ B b; for(int w=0;w<W;w++) b.add(D_(ord[k],w),F_(ord[k],w),z); if(k>=1) C(cudaStreamWaitEvent(s[k&1],e[k-1],0)); batch(b,s[k&1]); C(cudaEventRecord(e[k],s[k&1])); used[k&1]=true; }
        else if(m==8) for(int h=0;h<2;h++) for(int k=0;k<3;k++){ B b; for(int w=2*h;w<2*h+2;w++) b.add(D_(ord[k],w),F_(ord[k],w),z); batch(b,s[k]); used[k]=true; }
        else if(m==9) for(int k=0;k<3;k++) for(int h=0;h<2;h++){ B b; for(int w=2*h;w<2*h+2;w++) b.add(D_(ord[k],w),F_(ord[k],w),z); batch(b,s[0]); used[0]=true; }
        for(int i=0;i<N;i++) if(used[i]) while(cudaStreamQuery(s[i])==cudaErrorNotReady) ;
        double t2=now();
        sh->t0[me][r]=t0; sh->t2[me][r]=t2;
        barrier();
        if(me==0&&r>=10){ double first=1e300,last=0; for(int p=0;p<N;p++){ first=std::min(first,sh->t0[p][r]); last=std::max(last,sh->t2[p][r]); } all[m].push_back(last-first); }
      }
    }
    if(me==0){ printf("skew %.0f, %zu KiB: ",skew,z>>10); for(int m=0;m<MODES;m++){ auto&v=all[m]; std::sort(v.begin(),v.end()); printf("  %s %.1f (%.1f)",names[m],v[v.size()/2],v[v.size()/10]); } puts(""); fflush(stdout); }
  }
  barrier(); return 0;
}
int main(){ sh=(Sh*)mmap(0,sizeof(Sh),PROT_READ|PROT_WRITE,MAP_SHARED|MAP_ANONYMOUS,-1,0); new(&sh->count) std::atomic<int>(0); new(&sh->gen) std::atomic<int>(0);
  for(int i=0;i<N;i++) if(!fork()) _exit(child(i)); int st, bad=0; for(int i=0;i<N;i++){ wait(&st); bad|=st; } return bad!=0; }
