# shellcheck shell=bash disable=SC2154
# SPDX-License-Identifier: Apache-2.0
# Kubernetes' programs in the machines of cluster.sh, which sources this file.

# keys makes a certificate authority, the API server's certificate, the key of service accounts, and one token for each client.
keys() {
  local pki=$dir/pki who
  mkdir -p "$pki"
  chmod 700 "$pki"
  local new=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)
  openssl req -x509 "${new[@]}" -days 30 -subj /CN=podlace-cluster -keyout "$pki/ca.key" -out "$pki/ca.crt"
  openssl req "${new[@]}" -subj /CN=kube-apiserver -keyout "$pki/api.key" -out "$pki/api.csr"
  openssl x509 -req -in "$pki/api.csr" -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -CAcreateserial -days 30 -out "$pki/api.crt" \
    -extfile <(echo "subjectAltName=IP:127.0.0.1,$(each subject)")
  openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048 -out "$pki/sa.key"
  openssl pkey -in "$pki/sa.key" -pubout -out "$pki/sa.pub"
  client plane/admin admin system:masters
  for who in $nodes; do
    client "$who/kubelet" "system:node:$who" system:nodes
    client "$who/proxy" system:kube-proxy ""
  done
}

# client FILE USER GROUP writes a kubeconfig.
client() {
  local token
  token=$(openssl rand -hex 16)
  echo "$token,$2,$2,\"$3\"" >>"$dir/pki/tokens.csv"
  cat >"$dir/$1.kubeconfig" <<Y
apiVersion: v1
kind: Config
clusters: [{name: podlace, cluster: {server: "$(api)", certificate-authority: $dir/pki/ca.crt}}]
users: [{name: "$2", user: {token: $token}}]
contexts: [{name: podlace, context: {cluster: podlace, user: "$2"}}]
current-context: podlace
Y
}

# serve MACHINE NAME PROGRAM ARGS.. makes node.sh run the program and restart it when it ends.
serve() {
  local to=$dir/$1/services/$2
  printf '#!/bin/sh\nexec' >"$to"
  printf " '%s'" "${@:3}" >>"$to"
  chmod 755 "$to"
}

plane() {
  local pki=$dir/pki as=$dir/plane/admin.kubeconfig etcd=http://127.0.0.1:2379
  serve plane etcd "$kubernetes/etcd" --name=podlace --data-dir=/run/etcd --unsafe-no-fsync --listen-client-urls=$etcd \
    --advertise-client-urls=$etcd --listen-peer-urls=http://127.0.0.1:2380 --initial-advertise-peer-urls=http://127.0.0.1:2380 \
    --initial-cluster=podlace=http://127.0.0.1:2380 --log-level=warn
  serve plane apiserver "$kubernetes/kube-apiserver" --etcd-servers=$etcd --bind-address=:: --secure-port=6443 \
    "--advertise-address=$(address plane "${families%% *}")" "--tls-cert-file=$pki/api.crt" "--tls-private-key-file=$pki/api.key" \
    "--client-ca-file=$pki/ca.crt" "--token-auth-file=$pki/tokens.csv" --service-account-issuer=https://kubernetes.default.svc \
    "--service-account-key-file=$pki/sa.pub" "--service-account-signing-key-file=$pki/sa.key" --authorization-mode=Node,RBAC \
    --enable-admission-plugins=NodeRestriction --allow-privileged "--service-cluster-ip-range=$(each services)" \
    --kubelet-preferred-address-types=InternalIP $gates $apiserver
  serve plane controllers "$kubernetes/kube-controller-manager" "--kubeconfig=$as" --leader-elect=false --secure-port=0 \
    "--service-account-private-key-file=$pki/sa.key" "--root-ca-file=$pki/ca.crt" --allocate-node-cidrs "--cluster-cidr=$(each pods)" \
    "--service-cluster-ip-range=$(each services)" "--cluster-signing-cert-file=$pki/ca.crt" "--cluster-signing-key-file=$pki/ca.key" \
    $gates $controllers
  serve plane scheduler "$kubernetes/kube-scheduler" "--kubeconfig=$as" --leader-elect=false --secure-port=0 $gates
}

# member NODE writes the configuration of the node's kubelet and kube-proxy.
member() {
  local to=$dir/$1 runtime
  runtime=$(runtime "$1")
  ln -sfn "$dir/images" "$to/images"
  echo "nameserver $(address plane "${families%% *}")" >"$to/resolv.conf"
  cat >"$to/kubelet.yaml" <<Y
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix:///run/$runtime/$runtime.sock
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 50Mi, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%, imagefs.inodesFree: 0%}
resolvConf: $to/resolv.conf
clusterDNS: ["$(address plane "${families%% *}")"]
clusterDomain: cluster.local
nodeStatusUpdateFrequency: 5s
crashLoopBackOff: {maxContainerRestartPeriod: 1s}
Y
  cat >"$to/proxy.yaml" <<Y
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: $proxy
clientConnection: {kubeconfig: $to/proxy.kubeconfig}
clusterCIDR: $(each pods)
detectLocalMode: ClusterCIDR
conntrack: {maxPerCore: 0, min: 0}
iptables: {masqueradeAll: false}
nftables: {masqueradeAll: false}
Y
  serve "$1" kubelet "$kubernetes/kubelet" "--config=$to/kubelet.yaml" "--kubeconfig=$to/kubelet.kubeconfig" \
    "--node-ip=$(each address "$1")" $gates $kubelets
  [ "$proxy" = none ] || serve "$1" proxy "$kubernetes/kube-proxy" "--config=$to/proxy.yaml"
}
