// What two GPUs carry both ways at once: one push each way of all but a share, the share through pinned host memory in chunks.
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <algorithm>
#include <random>
#include <chrono>
#define C(x) do{cudaError_t e_=(x); if(e_){fprintf(stderr,"%s: %s\n",#x,cudaGetErrorString(e_));exit(1);} }while(0)
static double now(){ return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
struct Way { int from,to; char *src,*dst,*pinned; cudaStream_t direct,down,up; std::vector<cudaEvent_t> downed,upped; };
int main(int argc,char**argv){
  // Of so many MiB each.
  const size_t M=1<<20; const size_t mib=argc>1?strtoul(argv[1],nullptr,10):256; const size_t bytes=mib*M;
  if(!mib){ fprintf(stderr,"%s: the length of a message, in MiB\n",argv[1]); return 2; }
  const int ring=24;
  Way w[2];
  for(int i=0;i<2;i++){ C(cudaSetDevice(i)); C(cudaDeviceEnablePeerAccess(1-i,0)); }
  std::mt19937_64 rng(std::random_device{}());
  std::vector<unsigned long long> host(bytes/8); for(auto&x:host) x=rng();
  for(int i=0;i<2;i++){ w[i].from=i; w[i].to=1-i; C(cudaSetDevice(i)); C(cudaMalloc(&w[i].src,bytes)); C(cudaMemcpy(w[i].src,host.data(),bytes,cudaMemcpyHostToDevice)); C(cudaStreamCreateWithFlags(&w[i].direct,cudaStreamNonBlocking)); C(cudaStreamCreateWithFlags(&w[i].down,cudaStreamNonBlocking));
    C(cudaSetDevice(1-i)); C(cudaMalloc(&w[i].dst,bytes)); C(cudaStreamCreateWithFlags(&w[i].up,cudaStreamNonBlocking));
    C(cudaHostAlloc(&w[i].pinned,(size_t)ring*8*M,cudaHostAllocPortable));
    w[i].downed.resize(ring); w[i].upped.resize(ring);
    for(int k=0;k<ring;k++){ C(cudaSetDevice(i)); C(cudaEventCreateWithFlags(&w[i].downed[k],cudaEventDisableTiming)); C(cudaSetDevice(1-i)); C(cudaEventCreateWithFlags(&w[i].upped[k],cudaEventDisableTiming)); } }
  auto go=[&](double share,size_t chunk,int ways,int window)->double{
    size_t h=(size_t)(bytes*share)/4096*4096, d=bytes-h;
    C(cudaSetDevice(0)); C(cudaDeviceSynchronize()); C(cudaSetDevice(1)); C(cudaDeviceSynchronize());
    double t0=now();
    // Host chunks and direct parts are issued in turns of the two ways, message by message.
    std::vector<size_t> n(2,0);
    for(int m=0;m<window;m++){
      for(int i=0;i<ways;i++){ auto&x=w[i]; C(cudaSetDevice(x.from)); if(d) C(cudaMemcpyAsync(x.dst,x.src,d,cudaMemcpyDeviceToDevice,x.direct)); }
      for(size_t off=0;off<h;off+=chunk) for(int i=0;i<ways;i++){ auto&x=w[i]; size_t b=std::min(chunk,h-off); int k=n[i]%ring; bool again=n[i]>=(size_t)ring; n[i]++;
        char*slot=x.pinned+(size_t)k*8*M;
        C(cudaSetDevice(x.from)); if(again) C(cudaStreamWaitEvent(x.down,x.upped[k],0));
        C(cudaMemcpyAsync(slot,x.src+d+off,b,cudaMemcpyDeviceToHost,x.down)); C(cudaEventRecord(x.downed[k],x.down));
        C(cudaSetDevice(x.to)); C(cudaStreamWaitEvent(x.up,x.downed[k],0)); C(cudaMemcpyAsync(x.dst+d+off,slot,b,cudaMemcpyHostToDevice,x.up)); C(cudaEventRecord(x.upped[k],x.up)); }
    }
    for(int i=0;i<ways;i++){ C(cudaSetDevice(w[i].from)); C(cudaStreamSynchronize(w[i].direct)); C(cudaSetDevice(w[i].to)); C(cudaStreamSynchronize(w[i].up)); }
    return now()-t0; };
  double shares[]={0,0.02,0.03,0.04,0.05,0.06,0.07,0.08,0.09,0.10,0.11,0.12,0.14}; size_t chunks[]={1*M,2*M,4*M,8*M};
  for(int window: {16,1}) for(int ways: {2,1}){ printf("== %d way%s, %d x %zu MiB each, GB/s in all (times none through the host), medians of 9\nshare ",ways,ways>1?"s":"",window,mib); for(size_t c:chunks) printf("  chunks of %zu MiB",c/M); puts("");
    std::vector<std::vector<double>> best(13*4);
    for(int r=0;r<10;r++) for(int s=0;s<13;s++) for(int c=0;c<4;c++){ double t=go(shares[s],chunks[c],ways,window); if(r) best[s*4+c].push_back(t); }
    double base=0; for(int s=0;s<13;s++){ printf("%.2f  ",shares[s]); for(int c=0;c<4;c++){ auto&v=best[s*4+c]; std::sort(v.begin(),v.end()); double g=ways*window*(double)bytes/v[v.size()/2]/1e9; if(!s&&!c) base=g; printf("   %7.1f (%.3f)",g,g/base);} puts(""); fflush(stdout);} }
  // Only the host, both ways.
  for(int ways: {2,1}) for(size_t c: chunks){ std::vector<double> v; for(int r=0;r<8;r++){ double t=go(1.0,c,ways,1); if(r) v.push_back(t);} std::sort(v.begin(),v.end()); printf("host alone, %d ways, chunks of %zu MiB: %.1f GB/s in all\n",ways,c/M,ways*(double)bytes/v[v.size()/2]/1e9); }
  // The data.
  std::vector<unsigned long long> back(bytes/8);
  for(int i=0;i<2;i++){ C(cudaSetDevice(w[i].to)); C(cudaMemset(w[i].dst,0xEE,bytes)); C(cudaDeviceSynchronize()); }
  go(0.1,2*M,2,1);
  for(int i=0;i<2;i++){ C(cudaSetDevice(w[i].to)); C(cudaMemcpy(back.data(),w[i].dst,bytes,cudaMemcpyDeviceToHost)); printf("way %d: %s\n",i,back==host?"verified":"WRONG"); }
}
